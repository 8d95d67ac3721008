from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from littrainer.checkpoint import sealing
from littrainer.checkpoint.manifest import FileRecord, file_record, read_manifest
from littrainer.checkpoint.sealing import Seal, note_changes
from littrainer.checkpoint.verification import damage_in


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "below").mkdir()
    (tmp_path / "a").write_text("one")
    (tmp_path / "below" / "b").write_text("two")
    return tmp_path


def sealed(folder: Path) -> dict[str, sealing.Stamp]:
    seal = Seal(folder)
    stamps = seal.complete(sequence=4)
    seal.close()
    return stamps


def test_every_file_of_a_folder_is_in_its_manifest(folder: Path) -> None:
    sealed(folder)
    manifest = read_manifest(folder)
    assert manifest is not None and manifest.sequence == 4
    assert manifest.files == {name: file_record(folder / name) for name in ("a", "below/b")}


def test_files_written_again_after_they_were_added_are_summed_up_again(folder: Path) -> None:
    seal = Seal(folder)
    seal.add_all()
    (folder / "a").write_text("other and longer")
    os.remove(folder / "below" / "b")
    seal.complete()
    seal.close()
    assert damage_in(folder) == []
    assert set(read_manifest(folder).files) == {"a"}  # type: ignore[union-attr]


def test_a_known_sum_is_taken_as_it_is(folder: Path) -> None:
    seal = Seal(folder)
    seal.add(folder / "a", FileRecord(3, 99))
    seal.complete()
    seal.close()
    assert read_manifest(folder).files["a"] == FileRecord(3, 99)  # type: ignore[union-attr]


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
    stamps = sealed(folder)
    (folder / "a").write_text("changed by a callback")
    (folder / "added").touch()
    os.remove(folder / "below" / "b")
    assert damage_in(folder) != []
    stamps = note_changes(folder, stamps)
    assert damage_in(folder) == [] and set(stamps) == {"a", "added"}
    manifest = read_manifest(folder)
    assert manifest is not None and set(manifest.files) == {"a", "added"} and manifest.sequence == 4


def test_a_folder_that_was_not_touched_keeps_its_manifest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stamps = sealed(folder)
    monkeypatch.setattr(sealing, "write_manifest", lambda *_: pytest.fail("written again"))
    assert note_changes(folder, stamps) == stamps
