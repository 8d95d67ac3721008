"""The manifest of a checkpoint: size and checksum of each file, of large ones taken while the next are written.

The checksum is the CRC-32 of zlib: it finds every single flipped bit, and is the fastest that Python brings along.
"""

from __future__ import annotations

import errno
import json
import operator
import os
import time
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from littrainer.checkpoint.weights import WEIGHT_FILE

MANIFEST_NAME = "littrainer_manifest.json"
STAGED_MANIFEST_NAME = f"{MANIFEST_NAME}.unfinished"
MANIFEST_NAMES = (MANIFEST_NAME, STAGED_MANIFEST_NAME)
MANIFEST_VERSION = 1
# Bytes read at a time: large enough that summing them up leaves other threads to run, small enough for the cache.
CHUNK_BYTES = 1 << 20
# A thread costs more than it saves for a smaller one.
MIN_LARGE_FILE_BYTES = 1 << 22
MANIFEST_THREADS = 4
# Below this time for the first small file, threads for the others do not pay off.
MIN_FSYNC_FOR_THREADS_S = 0.001
# Errors of file systems without fsync, some for folders only.
NO_FSYNC_ERRORS = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)
# Values that change when a file is written again: size, modification time in ns, inode, device.
Stamp = tuple[int, int, int, int]
MAX_CACHED_MANIFESTS = 1000


class DamagedManifest(ValueError):
    """A manifest that is not as it was written."""


@dataclass(frozen=True)
class FileRecord:
    """The length in bytes and the CRC-32 of a file when it was written."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """The files of one checkpoint.

    Parameters:
        files: their records by path, relative to the checkpoint's folder.
        sequence: how many checkpoints of this run's folder had been written before it; None if it is not known.
        weights_are_finite: whether no weight is infinite or nan, and no optimizer's state nan; None if it is not known.
        is_thinned: whether what a resume needs besides the weights was deleted.
    """

    files: dict[str, FileRecord]
    sequence: int | None = None
    weights_are_finite: bool | None = None
    is_thinned: bool = False


# The manifests that this process wrote or read, by the stamps of their files, which stay if a folder is renamed.
_manifest_cache: dict[Stamp, Manifest] = {}


# ---- Files and manifests ---------------------------------------------------------------------------------------------


def file_record(path: str | os.PathLike[str]) -> FileRecord:
    """Read a file and sum it up."""
    size = crc32 = 0
    with open(path, "rb", buffering=0) as file:
        buffer = memoryview(bytearray(min(os.fstat(file.fileno()).st_size + 1, CHUNK_BYTES)))
        while count := file.readinto(buffer):
            size += count
            crc32 = zlib.crc32(buffer[:count], crc32)
    return FileRecord(size, crc32)


def list_files(folder: Path, with_links: bool = False) -> list[str]:
    """Return the paths of the files that a manifest lists; `with_links` those of a downloaded folder's links too."""
    return [name for name, _ in _entries_in(folder, with_links)]


def _entries_in(folder: Path, with_links: bool = False) -> list[tuple[str, os.DirEntry[str]]]:
    found, folders = [], [""]
    for inner in folders:
        # As os.walk does, pass over a folder that cannot be read or has just been deleted.
        with suppress(OSError), os.scandir(os.path.join(folder, inner)) as entries:
            for entry in sorted(entries, key=operator.attrgetter("name")):
                name = f"{inner}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{name}/")
                elif name not in MANIFEST_NAMES and (entry.is_file() if with_links else not entry.is_symlink()):
                    found.append((name, entry))
    return found


def write_manifest(
    folder: Path,
    files: Mapping[str, FileRecord] | None = None,
    sequence: int | None = 0,
    weights_are_finite: bool | None = None,
    is_thinned: bool = False,
) -> None:
    """Write the manifest of a folder, by default with new checksums; it is on the disk when this returns."""
    if files is None:
        files = {name: file_record(entry) for name, entry in _entries_in(folder)}
    content: dict[str, Any] = {
        "version": MANIFEST_VERSION,
        "sequence": sequence,
        "files": {name: {"size": record.size, "crc32": f"{record.crc32:08x}"} for name, record in files.items()},
    }
    if weights_are_finite is not None:
        content["weights_are_finite"] = weights_are_finite
    if is_thinned:
        content["is_thinned"] = True
    text = json.dumps(content, sort_keys=True)
    own = json.dumps({"crc32": _checksum_of(text)})
    unfinished = os.path.join(folder, STAGED_MANIFEST_NAME)
    with open(unfinished, "w", encoding="utf-8") as file:
        file.write(f"{text[:-1]}, {own[1:]}\n")
        file.flush()
        os.fsync(file.fileno())
        stamp = _stamp(os.fstat(file.fileno()))
    os.replace(unfinished, os.path.join(folder, MANIFEST_NAME))
    if len(_manifest_cache) >= MAX_CACHED_MANIFESTS:
        _manifest_cache.clear()
    _manifest_cache[stamp] = Manifest(dict(files), sequence, weights_are_finite, is_thinned)


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a folder; None if there is none, a DamagedManifest if it is not as it was written."""
    try:
        return parse_manifest((folder / MANIFEST_NAME).read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedManifest(f"{MANIFEST_NAME} cannot be read ({error})") from error


def parse_manifest(text: bytes) -> Manifest:
    """Return the manifest in a file; it raises DamagedManifest if the file is not as it was written."""
    try:
        content = json.loads(text)
        claimed = content.pop("crc32")
        if content["version"] != MANIFEST_VERSION:
            raise DamagedManifest(f"{MANIFEST_NAME} has version {content['version']!r}, which is not known here")
        if claimed != _checksum_of(json.dumps(content, sort_keys=True)):
            raise DamagedManifest(f"{MANIFEST_NAME} is not as it was written (its checksum differs)")
        entries = content["files"].items()
        files = {name: FileRecord(operator.index(entry["size"]), int(entry["crc32"], 16)) for name, entry in entries}
        sequence = operator.index(content["sequence"])
    except DamagedManifest:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedManifest(f"{MANIFEST_NAME} is not readable ({error})") from error
    return Manifest(files, sequence, content.get("weights_are_finite"), content.get("is_thinned", False))


def readable_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint; one that knows nothing if there is none, or it is damaged.

    One that this process wrote or read is not read again.
    """
    with suppress(OSError, DamagedManifest):
        stamp = _stamp(os.stat(os.path.join(folder, MANIFEST_NAME)))
        if stamp not in _manifest_cache:
            _manifest_cache[stamp] = read_manifest(folder) or Manifest({})
        return _manifest_cache[stamp]
    return Manifest({})


def _checksum_of(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


# ---- Complete files, hashed and flushed to the disk; large files while the next one is written -----------------------


def stat_files(folder: Path, with_links: bool = False) -> dict[str, Stamp]:
    """Return the stamps of all files in `list_files`."""
    return {name: _stamp(entry.stat()) for name, entry in _entries_in(folder, with_links)}


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev


def fsync_paths(*paths: str | os.PathLike[str]) -> None:
    """Flush the data of files, or the names in folders, to the disk, if the file system supports that."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in NO_FSYNC_ERRORS:
                raise
        finally:
            os.close(descriptor)


class ManifestBuilder:
    """Collects the records of a folder's files for its manifest, and flushes the files to the disk.

    Attributes:
        weights_are_finite: value for the manifest.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights_are_finite: bool | None = None
        # A thread hashes a large file while others wait for the disk, which takes several files as fast as one.
        self._threads = ThreadPoolExecutor(MANIFEST_THREADS)
        self._large: dict[str, tuple[Stamp, Future[FileRecord], Future[None]]] = {}

    def add_large_files(self) -> dict[str, Stamp]:
        """Begin to hash and flush large files that are new or written again; return the stamps of all files."""
        stamps = stat_files(self.folder)
        for name, stamp in stamps.items():
            if stamp[0] >= MIN_LARGE_FILE_BYTES and (name not in self._large or self._large[name][0] != stamp):
                path = os.path.join(self.folder, name)
                hashed, flushed = self._threads.submit(file_record, path), self._threads.submit(fsync_paths, path)
                self._large[name] = stamp, hashed, flushed
        return stamps

    def complete(self, sequence: int = 0) -> None:
        """Write the manifest; everything is on the disk when this returns."""
        stamps = self.add_large_files()
        small = [name for name in stamps if stamps[name][0] < MIN_LARGE_FILE_BYTES]
        paths = [os.path.join(self.folder, name) for name in small]
        records = dict(zip(small, map(file_record, paths), strict=True))
        start = time.perf_counter()
        fsync_paths(*paths[:1])
        is_slow = time.perf_counter() - start > MIN_FSYNC_FOR_THREADS_S
        list((self._threads.map if is_slow else map)(fsync_paths, paths[1:]))
        for name in stamps.keys() - records.keys():
            _, hashed, flushed = self._large[name]
            records[name] = hashed.result()
            flushed.result()
        write_manifest(self.folder, records, sequence, self.weights_are_finite)
        inner = sorted({Path()}.union(*(Path(name).parents for name in stamps if "/" in name)))
        fsync_paths(*(self.folder / path for path in inner))

    def close(self) -> None:
        """End the threads, with what they have begun."""
        self._threads.shutdown(cancel_futures=True)


def update_manifest(folder: Path) -> None:
    """Update the manifest with files that a user's code added, changed or deleted since it was written."""
    manifest = readable_manifest(folder)
    if manifest.sequence is None:
        return
    # The manifest was renamed after all files were written; times of another clock do not matter.
    written = os.stat(folder / MANIFEST_NAME).st_ctime_ns
    records: dict[str, FileRecord] = {}
    for name, entry in _entries_in(folder):
        status, earlier = entry.stat(), manifest.files.get(name)
        is_older = max(status.st_ctime_ns, status.st_mtime_ns) < written
        is_same = earlier is not None and is_older and status.st_size == earlier.size
        records[name] = earlier if earlier is not None and is_same else file_record(entry)
    changed = {name for name, _ in records.items() ^ manifest.files.items()}
    if not changed:
        return
    fsync_paths(*(folder / name for name in sorted(changed & records.keys())))
    # Weights that a user's code writes have not been looked at.
    is_same_model = not any(map(WEIGHT_FILE.fullmatch, changed))
    write_manifest(folder, records, manifest.sequence, manifest.weights_are_finite if is_same_model else None)
    fsync_paths(folder)
