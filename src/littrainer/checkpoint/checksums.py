"""The manifest of a checkpoint: size and CRC-32 of each file, computed in threads for large files."""

from __future__ import annotations

import errno
import json
import operator
import os
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
# Large enough for zlib to release the GIL, small enough for the CPU cache.
CHUNK_BYTES = 1 << 20
MIN_LARGE_FILE_BYTES = 1 << 22
MANIFEST_THREADS = 4
NO_FSYNC_ERRORS = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)
# Size, modification time in ns, inode and device, which identify a file's content.
Stamp = tuple[int, int, int, int]
get_stamp = operator.attrgetter("st_size", "st_mtime_ns", "st_ino", "st_dev")
MAX_CACHED_MANIFESTS = 1000


class DamagedManifest(ValueError):
    """Error for a manifest that was changed or truncated."""


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and CRC-32 of a file."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's files.

    Parameters:
        sequence: number that rises with each save to the run's folder; None without a readable manifest.
        weights_are_finite: whether weights are finite and optimizer states are not nan, if known.
        is_thinned: whether the states that a resume needs were deleted.
    """

    files: dict[str, FileRecord]
    sequence: int | None = None
    weights_are_finite: bool | None = None
    is_thinned: bool = False


_manifest_cache: dict[Stamp, Manifest] = {}


# ---- Files and manifests ---------------------------------------------------------------------------------------------


def file_record(path: str | os.PathLike[str]) -> FileRecord:
    size = crc32 = 0
    with open(path, "rb", buffering=0) as file:
        buffer = memoryview(bytearray(min(os.fstat(file.fileno()).st_size + 1, CHUNK_BYTES)))
        while count := file.readinto(buffer):
            size += count
            crc32 = zlib.crc32(buffer[:count], crc32)
    return FileRecord(size, crc32)


def list_files(folder: Path, with_links: bool = False) -> list[str]:
    """Return the files that a new manifest would list; `with_links` adds links to files, as in downloaded folders."""
    return [name for name, _ in _scan_entries(folder, with_links)]


def _scan_entries(folder: Path, with_links: bool = False) -> list[tuple[str, os.DirEntry[str]]]:
    files, folders = [], [""]
    for inner in folders:
        with suppress(OSError), os.scandir(os.path.join(folder, inner)) as entries:
            for entry in sorted(entries, key=operator.attrgetter("name")):
                name = f"{inner}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{name}/")
                elif name not in MANIFEST_NAMES and (entry.is_file() if with_links else not entry.is_symlink()):
                    files.append((name, entry))
    return files


def write_manifest(
    folder: Path,
    files: Mapping[str, FileRecord] | None = None,
    sequence: int | None = 0,
    weights_are_finite: bool | None = None,
    is_thinned: bool = False,
) -> None:
    """Write and fsync a manifest, by default with new checksums."""
    if files is None:
        files = {name: file_record(entry) for name, entry in _scan_entries(folder)}
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
    checksum = json.dumps({"crc32": _checksum_of(text)})
    staged = os.path.join(folder, STAGED_MANIFEST_NAME)
    with open(staged, "w", encoding="utf-8") as file:
        file.write(f"{text[:-1]}, {checksum[1:]}\n")
        file.flush()
        os.fsync(file.fileno())
        stamp = get_stamp(os.fstat(file.fileno()))
    os.replace(staged, os.path.join(folder, MANIFEST_NAME))
    if len(_manifest_cache) >= MAX_CACHED_MANIFESTS:
        _manifest_cache.clear()
    _manifest_cache[stamp] = Manifest(dict(files), sequence, weights_are_finite, is_thinned)


def read_manifest(folder: Path) -> Manifest | None:
    """Return a manifest, or None if there is none.

    Raises:
        DamagedManifest: the manifest was changed, or cannot be read.
    """
    try:
        return parse_manifest((folder / MANIFEST_NAME).read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedManifest(f"{MANIFEST_NAME} cannot be read ({error})") from error


def parse_manifest(text: bytes) -> Manifest:
    try:
        content = json.loads(text)
        claimed = content.pop("crc32")
        if content["version"] != MANIFEST_VERSION:
            raise DamagedManifest(f"{MANIFEST_NAME} has version {content['version']!r}, which is unknown here")
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


def read_manifest_or_empty(folder: Path) -> Manifest:
    """Return a checkpoint's manifest, cached; empty if missing or damaged."""
    with suppress(OSError, DamagedManifest):
        stamp = get_stamp(os.stat(os.path.join(folder, MANIFEST_NAME)))
        if stamp not in _manifest_cache:
            _manifest_cache[stamp] = read_manifest(folder) or Manifest({})
        return _manifest_cache[stamp]
    return Manifest({})


def _checksum_of(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


# ---- Checksums and fsync ---------------------------------------------------------------------------------------------


def stat_files(folder: Path, with_links: bool = False) -> dict[str, Stamp]:
    return {name: get_stamp(entry.stat()) for name, entry in _scan_entries(folder, with_links)}


def fsync_paths(*paths: str | os.PathLike[str]) -> None:
    """Flush files or folders to the disk, if the file system can."""
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
    """Builder of a manifest: it hashes and fsyncs the checkpoint's files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights_are_finite: bool | None = None
        self._threads = ThreadPoolExecutor(MANIFEST_THREADS)
        self._large: dict[str, tuple[Stamp, Future[FileRecord], Future[None]]] = {}

    def add_large_files(self) -> dict[str, Stamp]:
        """Start to hash and fsync large files, and return the stamps of all files."""
        stamps = stat_files(self.folder)
        for name, stamp in stamps.items():
            if stamp[0] >= MIN_LARGE_FILE_BYTES and (name not in self._large or self._large[name][0] != stamp):
                path = os.path.join(self.folder, name)
                hashed, flushed = self._threads.submit(file_record, path), self._threads.submit(fsync_paths, path)
                self._large[name] = stamp, hashed, flushed
        return stamps

    def complete(self, sequence: int = 0) -> None:
        """Hash the remaining files, write the manifest, and fsync files and folders."""
        stamps = self.add_large_files()
        small = [name for name in stamps if stamps[name][0] < MIN_LARGE_FILE_BYTES]
        paths = [os.path.join(self.folder, name) for name in small]
        records = dict(zip(small, map(file_record, paths), strict=True))
        list(self._threads.map(fsync_paths, paths))
        for name in stamps.keys() - records.keys():
            _, hashed, flushed = self._large[name]
            records[name] = hashed.result()
            flushed.result()
        write_manifest(self.folder, records, sequence, self.weights_are_finite)
        inner = sorted({Path()}.union(*(Path(name).parents for name in stamps if "/" in name)))
        fsync_paths(*(self.folder / path for path in inner))

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


def update_manifest(folder: Path) -> None:
    """Update a manifest for files that user code changed, added or removed."""
    manifest = read_manifest_or_empty(folder)
    if manifest.sequence is None:
        return
    # Files are compared with the manifest's own time, since a network disk's clock may differ from this host's.
    written = os.stat(folder / MANIFEST_NAME).st_ctime_ns
    records: dict[str, FileRecord] = {}
    for name, entry in _scan_entries(folder):
        status, earlier = entry.stat(), manifest.files.get(name)
        is_older = max(status.st_ctime_ns, status.st_mtime_ns) < written
        is_same = earlier is not None and is_older and status.st_size == earlier.size
        records[name] = earlier if earlier is not None and is_same else file_record(entry)
    changed = {name for name, _ in records.items() ^ manifest.files.items()}
    if not changed:
        return
    fsync_paths(*(folder / name for name in sorted(changed & records.keys())))
    # User code may have written non-finite weights.
    is_same_model = not any(map(WEIGHT_FILE.fullmatch, changed))
    write_manifest(folder, records, manifest.sequence, manifest.weights_are_finite if is_same_model else None)
    fsync_paths(folder)
