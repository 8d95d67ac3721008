"""The manifest of a checkpoint: size and checksum of each file, taken while the files are written.

The checksum is the CRC-32 of zlib: it finds every single flipped bit, and is the fastest that Python brings along.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import threading
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

MANIFEST_NAME = "littrainer_manifest.json"
UNFINISHED_MANIFEST_NAME = f"{MANIFEST_NAME}.unfinished"
MANIFEST_VERSION = 1
# Bytes read at a time: large enough that summing them up leaves other threads to run, small enough for the cache.
BYTES_AT_A_TIME = 1 << 20
# After this many bytes the disk begins to take them, while the next ones are written.
BYTES_BETWEEN_SYNCS = 1 << 26
# What file systems answer that cannot do it, some for folders only.
NOT_SUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)


class DamagedManifest(ValueError):
    """A manifest that is not as it was written."""


@dataclass(frozen=True)
class FileRecord:
    """What a file was when it was written.

    Parameters:
        size: its length in bytes.
        crc32: its CRC-32.
    """

    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """The files of one checkpoint.

    Parameters:
        files: their records by path, relative to the checkpoint's folder, with forward slashes.
        sequence: how many checkpoints of this run's folder had been written before it, whatever the clock said.
    """

    files: dict[str, FileRecord]
    sequence: int = 0


# ---- Files and manifests ---------------------------------------------------------------------------------------------


def file_record(path: Path) -> FileRecord:
    """Read a file and sum it up."""
    size = crc32 = 0
    buffer = memoryview(bytearray(BYTES_AT_A_TIME))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            size += count
            crc32 = zlib.crc32(buffer[:count], crc32)
    return FileRecord(size, crc32)


def files_in(folder: Path, with_links: bool = False) -> Iterator[str]:
    """The paths of the files that a manifest lists, relative to the folder.

    Parameters:
        with_links: links to files too, of which a folder may consist that was downloaded or is kept under versions.
            Those to nothing are left out.
    """
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(parent, name)
            is_wanted = path.is_file() if with_links else not path.is_symlink()
            if is_wanted and path not in (folder / MANIFEST_NAME, folder / UNFINISHED_MANIFEST_NAME):
                yield path.relative_to(folder).as_posix()


def write_manifest(folder: Path, files: Mapping[str, FileRecord] | None = None, sequence: int = 0) -> None:
    """Write the manifest of a folder; it is on the disk when this returns.

    Parameters:
        files: the records of its files; by default every file is read and summed up.
        sequence: as in `Manifest`.
    """
    if files is None:
        files = {name: file_record(folder / name) for name in files_in(folder)}
    content: dict[str, Any] = {
        "version": MANIFEST_VERSION,
        "sequence": sequence,
        "files": {name: {"size": record.size, "crc32": f"{record.crc32:08x}"} for name, record in files.items()},
    }
    content["crc32"] = _own_checksum(content)
    unfinished = folder / UNFINISHED_MANIFEST_NAME
    with open(unfinished, "w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=1, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, folder / MANIFEST_NAME)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None where there is none, as in checkpoints of transformers.

    Raises:
        DamagedManifest: it is not as it was written, or names files outside of the folder.
    """
    try:
        text = (folder / MANIFEST_NAME).read_text("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedManifest(f"{MANIFEST_NAME} cannot be read ({error})") from error
    try:
        content = json.loads(text)
        claimed = content.pop("crc32")
        if content["version"] != MANIFEST_VERSION:
            raise DamagedManifest(f"{MANIFEST_NAME} has version {content['version']!r}, which is not known here")
        if claimed != _own_checksum(content):
            raise DamagedManifest(f"{MANIFEST_NAME} is not as it was written (its checksum differs)")
        files = {name: FileRecord(entry["size"], int(entry["crc32"], 16)) for name, entry in content["files"].items()}
        sequence = int(content["sequence"])
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise DamagedManifest(f"{MANIFEST_NAME} is not readable ({error})") from error
    outside = [name for name in files if leaves_folder(name)]
    if outside:
        raise DamagedManifest(f"{MANIFEST_NAME} names {outside[0]!r}, which is outside of the checkpoint")
    return Manifest(files, sequence)


def leaves_folder(name: str) -> bool:
    """Whether a relative path, as a file names it, would leave the folder that it is relative to."""
    path = PurePosixPath(name.replace("\\", "/"))
    if not path.parts or path.is_absolute():
        return True
    return ".." in path.parts or ":" in path.parts[0]


def _own_checksum(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


# ---- Complete files, summed up and brought onto the disk beside the writing of the next one --------------------------


def stamp_of(path: Path) -> tuple[int, int, int]:
    """What changes when a file is written again: size in bytes, modification time in nanoseconds, inode."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ino


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
        self._threads = ThreadPoolExecutor(2)
        self._added: dict[str, tuple[Any, Future[FileRecord] | FileRecord, Future[None]]] = {}

    def add(self, path: Path, record: FileRecord | None = None) -> None:
        """Begin to seal a file that is complete.

        Parameters:
            record: its size and checksum, where they are known.
        """
        stamp = stamp_of(path)
        summed = self._threads.submit(file_record, path) if record is None else record
        self._added[path.relative_to(self.folder).as_posix()] = stamp, summed, self._threads.submit(to_disk, path)

    def add_all(self) -> None:
        """Begin to seal the files that are in the folder now and are new or written again."""
        for name in files_in(self.folder):
            path = self.folder / name
            if name not in self._added or self._added[name][0] != stamp_of(path):
                self.add(path)

    def complete(self, sequence: int = 0) -> None:
        """Write the manifest; everything is on the disk when this returns."""
        self.add_all()
        records: dict[str, FileRecord] = {}
        for name in files_in(self.folder):
            _, summed, synced = self._added[name]
            synced.result()
            records[name] = summed if isinstance(summed, FileRecord) else summed.result()
        write_manifest(self.folder, records, sequence)
        for parent, _, _ in os.walk(self.folder):
            to_disk(Path(parent))

    def close(self) -> None:
        """End the threads, with what they have begun."""
        self._threads.shutdown(cancel_futures=True)


def note_changes(folder: Path) -> None:
    """Bring the manifest up to date with files that a user's code added, changed or deleted since it was written."""
    manifest = read_manifest(folder)
    if manifest is None:
        return
    # Renaming the manifest into its place was the last change of all files; times of another clock do not matter.
    written = os.stat(folder / MANIFEST_NAME).st_ctime_ns
    records: dict[str, FileRecord] = {}
    for name in files_in(folder):
        status = os.stat(folder / name)
        is_known = name in manifest.files and status.st_size == manifest.files[name].size
        if is_known and max(status.st_ctime_ns, status.st_mtime_ns) < written:
            records[name] = manifest.files[name]
        else:
            records[name] = file_record(folder / name)
    if records == manifest.files:
        return
    for name in records:
        if records[name] != manifest.files.get(name):
            to_disk(folder / name)
    write_manifest(folder, records, manifest.sequence)
    to_disk(folder)


# ---- Files of torch.save, summed up while they are written -----------------------------------------------------------


class SummingFile(io.RawIOBase):
    """A file to write to, front to back, that knows the checksum of what was written.

    A long file goes to the disk while it grows.

    Parameters:
        path: the file, made anew.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        self._syncing = ThreadPoolExecutor(1)
        self._synced: Future[None] | None = None
        self._bytes_at_sync = 0
        self.record = FileRecord(0, 0)

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: Any) -> int:
        """Write a piece, as much of it as the system takes at a time."""
        piece = memoryview(data).cast("B")
        count = self._file.write(piece)
        self.record = FileRecord(self.record.size + count, zlib.crc32(piece[:count], self.record.crc32))
        is_syncing = self._synced is not None and not self._synced.done()
        if self.record.size - self._bytes_at_sync >= BYTES_BETWEEN_SYNCS and not is_syncing:
            if self._synced is not None:
                self._synced.result()
            self._bytes_at_sync = self.record.size
            self._synced = self._syncing.submit(os.fsync, self._file.fileno())
        return count

    def close(self) -> None:
        """End what was begun."""
        self._syncing.shutdown()
        self._file.close()
        super().close()


def save_and_sum(value: Any, path: Path | str, without_inner_sums: bool = False) -> FileRecord:
    """`torch.save` to a file.

    Parameters:
        without_inner_sums: leave out the checksums that torch puts into its archives, which take half as long again as
            the writing. For large files with a record in a manifest.

    Returns:
        the file's size and checksum.
    """
    file = SummingFile(Path(path))
    # torch writes many small pieces beside the tensors.
    with io.BufferedWriter(file, BYTES_AT_A_TIME) as buffered, _inner_sums(not without_inner_sums):
        torch.save(value, buffered)
    return file.record


@contextlib.contextmanager
def _inner_sums(wanted: bool) -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    # It is one setting for all threads, and another one may be saving a file of the user's own.
    if wanted or threading.current_thread() is not threading.main_thread():
        yield
        return
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
