"""The manifest of a checkpoint: the size and a checksum of each file, as they were when the checkpoint was written.

The checksum is the CRC-32 of zlib: it finds every single flipped bit, and is the fastest that Python brings along.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

MANIFEST_NAME = "littrainer_manifest.json"
UNFINISHED_MANIFEST_NAME = f"{MANIFEST_NAME}.unfinished"
MANIFEST_VERSION = 1
# Bytes read at a time: large enough that summing them up leaves other threads to run, small enough for the cache.
BYTES_AT_A_TIME = 1 << 20


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
