from __future__ import annotations

import errno
import json
import math
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from littrainer.checkpoint import checksums
from littrainer.checkpoint.checksums import (
    CHUNK_BYTES,
    MANIFEST_NAME,
    MIN_LARGE_FILE_BYTES,
    DamagedManifest,
    FileRecord,
    Manifest,
    ManifestBuilder,
    file_record,
    list_files,
    read_manifest,
    read_manifest_or_empty,
    update_manifest,
    write_manifest,
)
from littrainer.checkpoint.verification import find_damage


def test_a_manifest_lists_files_in_subfolders_but_neither_links_nor_itself(tmp_path: Path) -> None:
    data = os.urandom(CHUNK_BYTES * 2 + 3)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "weights").write_bytes(data)
    (tmp_path / "a").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for sequence in (0, 7):
        write_manifest(tmp_path, sequence=sequence)
        manifest = read_manifest(tmp_path)
        assert manifest is not None and manifest.sequence == sequence
        assert manifest.files == {"a": FileRecord(0, 0), "adapter/weights": FileRecord(len(data), zlib.crc32(data))}
    assert list_files(tmp_path) == ["a", "adapter/weights"]


def test_a_manifest_is_cached_until_its_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, moved = tmp_path / "staging", tmp_path / "checkpoint-1"
    folder.mkdir()
    write_manifest(folder, sequence=1)
    folder.rename(moved)
    with monkeypatch.context() as patch:
        patch.setattr(checksums, "read_manifest", lambda folder: pytest.fail("read again"))
        assert read_manifest_or_empty(moved) == Manifest({}, sequence=1)
        # Equal sizes, within a tick of the file system's clock.
        for sequence in range(2, 9):
            write_manifest(moved, sequence=sequence)
            assert read_manifest_or_empty(moved).sequence == sequence
    (moved / "littrainer_manifest.json").write_text("half")
    assert read_manifest_or_empty(moved) == read_manifest_or_empty(tmp_path) == Manifest({})


@pytest.fixture(params=[0, MIN_LARGE_FILE_BYTES], ids=["large files", "small files"])
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    monkeypatch.setattr(checksums, "MIN_LARGE_FILE_BYTES", request.param)
    (tmp_path / "below").mkdir()
    (tmp_path / "a").write_text("one")
    (tmp_path / "below" / "b").write_text("two")
    return tmp_path


def write_with_builder(folder: Path) -> None:
    builder = ManifestBuilder(folder)
    builder.complete(sequence=4)
    builder.close()


def test_files_that_change_after_hashing_are_hashed_again(folder: Path) -> None:
    builder = ManifestBuilder(folder)
    builder.add_large_files()
    (folder / "a").write_text("other and longer")
    os.remove(folder / "below" / "b")
    builder.complete()
    builder.close()
    assert find_damage(folder) == []
    assert set(read_manifest(folder).files) == {"a"}  # type: ignore[union-attr]


def test_all_files_and_folders_are_fsynced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    original = os.fsync

    def watch(descriptor: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), folder))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    write_with_builder(folder)
    assert set(synced) == {"a", "below/b", "below", ".", "littrainer_manifest.json.unfinished"}
    # After a power failure no file in an existing manifest may be missing.
    assert synced.index("littrainer_manifest.json.unfinished") > max(synced.index("a"), synced.index("below/b"))
    assert synced[-2:] == [".", "below"]


def test_a_file_system_without_fsync_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    write_with_builder(folder)
    assert find_damage(folder) == []


def test_later_changes_by_user_code_are_no_damage(folder: Path) -> None:
    write_with_builder(folder)
    written = os.stat(folder / "a")
    (folder / "a").write_text("six")
    # As after a copy that preserves times.
    os.utime(folder / "a", ns=(written.st_atime_ns, written.st_mtime_ns))
    (folder / "added").touch()
    os.remove(folder / "below" / "b")
    update_manifest(folder)
    assert find_damage(folder) == []
    manifest = read_manifest(folder)
    assert manifest is not None and manifest.sequence == 4
    assert manifest.files == {name: file_record(folder / name) for name in ("a", "added")}


FILE = {"size": 1, "crc32": "00000000"}
ODD_MANIFESTS: dict[str, Any] = {
    "an endless size": {"files": {"x": {**FILE, "size": math.inf}}},
    "a sum that is no number": {"files": {"x": {**FILE, "crc32": "zz"}}},
    "a number as sum": {"files": {"x": {**FILE, "crc32": 5}}},
    "a list of files": {"files": ["x"]},
    "deep": "[" * 200_000,
}


@pytest.mark.parametrize("odd", ODD_MANIFESTS.values(), ids=ODD_MANIFESTS.keys())
def test_an_odd_manifest_is_a_damaged_manifest(tmp_path: Path, odd: Any) -> None:
    if isinstance(odd, dict):
        content = {"version": 1, "sequence": 1, "files": {"x": FILE}, **odd}
        odd = json.dumps({**content, "crc32": checksums._checksum_of(json.dumps(content, sort_keys=True))})
    (tmp_path / MANIFEST_NAME).write_text(odd)
    with pytest.raises(DamagedManifest, match=MANIFEST_NAME):
        read_manifest(tmp_path)
    assert read_manifest_or_empty(tmp_path).sequence is None
