from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import pytest

from littrainer.checkpoint.manifest import (
    BYTES_AT_A_TIME,
    MANIFEST_NAME,
    DamagedManifest,
    FileRecord,
    file_record,
    files_in,
    leaves_folder,
    read_manifest,
    write_manifest,
)


@pytest.mark.parametrize("size", [0, 1, BYTES_AT_A_TIME, BYTES_AT_A_TIME * 2 + 3])
def test_a_file_is_summed_up_whatever_its_length(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    assert file_record(tmp_path / "file") == FileRecord(size, zlib.crc32(data))


def test_a_manifest_lists_files_in_subfolders_and_neither_links_nor_itself(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "weights").write_bytes(b"123")
    (tmp_path / "a").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for sequence in (0, 7):
        write_manifest(tmp_path, sequence=sequence)
        manifest = read_manifest(tmp_path)
        assert manifest is not None and manifest.sequence == sequence
        assert manifest.files == {"a": FileRecord(0, 0), "adapter/weights": FileRecord(3, zlib.crc32(b"123"))}
    assert [*files_in(tmp_path)] == ["a", "adapter/weights"]


def test_a_folder_without_a_manifest_has_none(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None


def test_every_flipped_bit_of_a_manifest_is_found_or_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    write_manifest(tmp_path, sequence=3)
    path, expected = tmp_path / MANIFEST_NAME, read_manifest(tmp_path)
    data = path.read_bytes()
    found = 0
    for bit in range(len(data) * 8):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            assert read_manifest(tmp_path) == expected, bit
        except DamagedManifest as error:
            assert MANIFEST_NAME in str(error)
            found += 1
    assert found > len(data) * 7


@pytest.mark.parametrize("length", [0, 1, 40, 100])
def test_a_manifest_that_was_cut_off_is_damaged(tmp_path: Path, length: int) -> None:
    (tmp_path / "file").touch()
    write_manifest(tmp_path)
    (tmp_path / MANIFEST_NAME).write_bytes((tmp_path / MANIFEST_NAME).read_bytes()[:length])
    with pytest.raises(DamagedManifest, match=MANIFEST_NAME):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../file", "/etc/passwd", "a/../../b", "..\\file", "C:\\file", ""])
def test_a_manifest_that_names_a_file_outside_is_refused(tmp_path: Path, name: str) -> None:
    assert leaves_folder(name)
    write_manifest(tmp_path, {name: FileRecord(0, 0)})
    with pytest.raises(DamagedManifest, match="outside of the checkpoint"):
        read_manifest(tmp_path)


def test_a_manifest_of_a_later_version_is_not_taken_for_one_of_this(tmp_path: Path) -> None:
    write_manifest(tmp_path)
    content = json.loads((tmp_path / MANIFEST_NAME).read_text())
    content["version"] = 2
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(content))
    with pytest.raises(DamagedManifest, match="version 2"):
        read_manifest(tmp_path)
