from __future__ import annotations

import errno
import json
import os
import threading
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer.checkpoint import checksums
from littrainer.checkpoint.checksums import (
    BYTES_AT_A_TIME,
    MANIFEST_NAME,
    DamagedManifest,
    FileRecord,
    Seal,
    SummingFile,
    file_record,
    files_in,
    leaves_folder,
    note_changes,
    read_manifest,
    save_and_sum,
    write_manifest,
)
from littrainer.checkpoint.verification import damage_in
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS, wait_until


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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "below").mkdir()
    (tmp_path / "a").write_text("one")
    (tmp_path / "below" / "b").write_text("two")
    return tmp_path


def sealed(folder: Path) -> None:
    seal = Seal(folder)
    seal.complete(sequence=4)
    seal.close()


def test_files_written_again_after_they_were_added_are_summed_up_again(folder: Path) -> None:
    seal = Seal(folder)
    seal.add_all()
    (folder / "a").write_text("other and longer")
    os.remove(folder / "below" / "b")
    seal.complete()
    seal.close()
    assert damage_in(folder) == []
    assert set(read_manifest(folder).files) == {"a"}  # type: ignore[union-attr]


def test_all_files_and_folders_are_brought_onto_the_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    original = os.fsync

    def watch(descriptor: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), folder))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    sealed(folder)
    assert set(synced) == {"a", "below/b", "below", ".", "littrainer_manifest.json.unfinished"}
    # A manifest that is there after a power cut must not speak of files that are not.
    assert synced.index("littrainer_manifest.json.unfinished") > max(synced.index("a"), synced.index("below/b"))
    assert synced[-2:] == [".", "below"]


def test_a_disk_that_fails_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        sealed(folder)


def test_a_file_system_that_cannot_wait_for_the_disk_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    sealed(folder)
    assert damage_in(folder) == []


def test_what_a_users_code_does_to_the_files_afterwards_is_no_damage(folder: Path) -> None:
    sealed(folder)
    written = os.stat(folder / "a")
    (folder / "a").write_text("six")
    # As a copy with the times of the original leaves it.
    os.utime(folder / "a", ns=(written.st_atime_ns, written.st_mtime_ns))
    (folder / "added").touch()
    os.remove(folder / "below" / "b")
    note_changes(folder)
    assert damage_in(folder) == []
    manifest = read_manifest(folder)
    assert manifest is not None and manifest.sequence == 4
    assert manifest.files == {name: file_record(folder / name) for name in ("a", "added")}


def test_a_folder_that_was_not_touched_keeps_its_manifest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed(folder)
    monkeypatch.setattr(checksums, "write_manifest", lambda *_: pytest.fail("written again"))
    note_changes(folder)


LARGE = 1 << 18


@pytest.mark.parametrize("without_inner_sums", [False, True])
@pytest.mark.parametrize("numbers", [1, 10, LARGE])
def test_the_sum_of_a_saved_object_is_that_of_its_file(tmp_path: Path, numbers: int, without_inner_sums: bool) -> None:
    value = {"state": {0: torch.randn(numbers), 1: torch.arange(3)}, "lr": 0.5}
    record = save_and_sum(value, tmp_path / "file", without_inner_sums)
    assert record == file_record(tmp_path / "file")
    loaded: Any = torch.load(tmp_path / "file", weights_only=True)
    assert torch.equal(loaded["state"][0], value["state"][0]) and loaded["lr"] == 0.5  # type: ignore[index]


def test_the_bytes_are_those_that_torch_writes_itself(tmp_path: Path) -> None:
    value = {"a": torch.arange(LARGE)}
    save_and_sum(value, tmp_path / "file")
    torch.save(value, tmp_path / "theirs")
    # The folder in the archive has the file's name where torch knows it.
    assert (tmp_path / "file").stat().st_size == pytest.approx((tmp_path / "theirs").stat().st_size, abs=200)


@pytest.mark.parametrize("size", [1, LARGE])
def test_a_full_disk_is_the_systems_own_error(size: int) -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        save_and_sum({"a": torch.zeros(size)}, "/dev/full")
    assert caught.value.errno == errno.ENOSPC


def test_a_long_file_goes_to_the_disk_while_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(checksums, "BYTES_BETWEEN_SYNCS", 1000)
    monkeypatch.setattr(os, "fsync", synced.append)
    with SummingFile(tmp_path / "file") as file:
        file.write(b"a" * 999)
        assert synced == []
        file.write(b"a")
    assert len(synced) == 1 and file.record == file_record(tmp_path / "file")


def test_a_disk_that_fails_meanwhile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checksums, "BYTES_BETWEEN_SYNCS", 10)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"), SummingFile(tmp_path / "file") as file:
        wait_until(lambda: file.write(b"a" * 10) == 0, "a write tells of the failure")


def inner_sums(path: Path) -> set[bool]:
    with zipfile.ZipFile(path) as archive:
        return {entry.CRC != 0 for entry in archive.infolist()}


def test_torchs_own_sums_are_left_out_of_this_file_only(tmp_path: Path) -> None:
    value = {"a": torch.arange(10)}
    save_and_sum(value, tmp_path / "without", without_inner_sums=True)
    save_and_sum(value, tmp_path / "with")
    torch.save(value, tmp_path / "torch's")
    assert inner_sums(tmp_path / "without") == {False}
    assert inner_sums(tmp_path / "with") == inner_sums(tmp_path / "torch's") == {True}


def test_another_thread_leaves_the_setting_of_all_threads_alone(tmp_path: Path) -> None:
    thread = threading.Thread(target=save_and_sum, args=({"a": torch.arange(10)}, tmp_path / "file", True))
    thread.start()
    thread.join(LONGEST_WAIT_SECONDS)
    assert inner_sums(tmp_path / "file") == {True}
