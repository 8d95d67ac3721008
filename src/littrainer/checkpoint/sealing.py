"""Files summed up and brought onto the disk, each as soon as it is complete, beside the writing of the next one."""

from __future__ import annotations

import errno
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from littrainer.checkpoint.manifest import FileRecord, file_record, files_in, read_manifest, write_manifest

# What file systems answer that cannot do it, some for folders only.
NOT_SUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)


class Stamp(NamedTuple):
    """What changes when a file is written again: size in bytes, modification time in nanoseconds, inode."""

    size: int
    modified: int
    inode: int


def stamp_of(path: Path) -> Stamp:
    """The stamp of a file."""
    status = os.stat(path)
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ino)


def to_disk(path: Path) -> None:
    """Wait until a file's data, or a folder's names, are on the disk, where the file system can say so.

    Raises:
        OSError: the disk is full, or fails.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
    finally:
        os.close(descriptor)


class Seal:
    """Collects the records of a folder's files for its manifest, and brings them onto the disk.

    `add` may be called for a file that is complete; those it was not called for are dealt with at the end, as are those
    that were written again.

    Parameters:
        folder: the folder that is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # One thread sums up while another waits for the disk.
        self._summing, self._syncing = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._added: dict[str, tuple[Stamp, Future[FileRecord], Future[None]]] = {}

    def add(self, path: Path, record: FileRecord | None = None) -> None:
        """Begin to seal a file that is complete.

        Parameters:
            record: its size and checksum, where they are known.
        """
        stamp = stamp_of(path)
        synced = self._syncing.submit(to_disk, path)
        summed: Future[FileRecord]
        if record is None:
            summed = self._summing.submit(file_record, path)
        else:
            summed = Future()
            summed.set_result(record)
        self._added[path.relative_to(self.folder).as_posix()] = stamp, summed, synced

    def add_all(self) -> None:
        """Begin to seal the files that are in the folder now and are new or written again."""
        for name in files_in(self.folder):
            path = self.folder / name
            if name not in self._added or self._added[name][0] != stamp_of(path):
                self.add(path)

    def complete(self, sequence: int = 0) -> dict[str, Stamp]:
        """Write the manifest; everything is on the disk when this returns.

        Returns:
            the stamps of the files, from which `note_changes` knows which were written again.
        """
        self.add_all()
        present = list(files_in(self.folder))
        records: dict[str, FileRecord] = {}
        for name in present:
            _, summed, synced = self._added[name]
            synced.result()
            records[name] = summed.result()
        write_manifest(self.folder, records, sequence)
        for parent, _, _ in os.walk(self.folder):
            to_disk(Path(parent))
        return {name: self._added[name][0] for name in present}

    def close(self) -> None:
        """End the threads, with what they have begun."""
        for pool in (self._summing, self._syncing):
            pool.shutdown(cancel_futures=True)


def note_changes(folder: Path, stamps: dict[str, Stamp]) -> dict[str, Stamp]:
    """Bring the manifest up to date with files that a user's code added, changed or deleted after it was written.

    Parameters:
        stamps: the files' stamps when the manifest was written.

    Returns:
        their stamps now.
    """
    manifest = read_manifest(folder)
    now = {name: stamp_of(folder / name) for name in files_in(folder)}
    if manifest is None or now == stamps:
        return now
    records: dict[str, FileRecord] = {}
    for name, stamp in now.items():
        if stamp == stamps.get(name):
            records[name] = manifest.files[name]
        else:
            records[name] = file_record(folder / name)
            to_disk(folder / name)
    write_manifest(folder, records, manifest.sequence)
    to_disk(folder)
    return now
