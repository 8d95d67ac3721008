from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from littrainer.checkpoint import manifest as manifest_module
from littrainer.checkpoint.manifest import MANIFEST_NAME, UNFINISHED_MANIFEST_NAME, read_manifest, write_manifest
from littrainer.checkpoint.resealing import NotResealed, main, reseal
from littrainer.checkpoint.verification import damage_in
from tests.checkpoint.test_verification import write_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_checkpoint(tmp_path / "checkpoint-5")
    write_manifest(folder, sequence=7)
    return folder


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_an_edited_checkpoint_is_sealed_anew_and_keeps_its_place(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "config.json").write_text('{"edited": true}')
    (folder / "notes.txt").touch()
    (folder / "training_args.bin").unlink()
    assert damage_in(folder) != []
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "changed: config.json",
        "added: notes.txt",
        "gone: training_args.bin",
        f"{folder / MANIFEST_NAME} is written.",
    ]
    assert damage_in(folder) == [] and read_manifest(folder).sequence == 7  # type: ignore[union-attr]
    flip_a_bit(folder / "optimizer.pt")
    assert damage_in(folder) == ["optimizer.pt is not as it was written (its checksum differs)."]


def test_what_has_not_changed_is_said_to_be_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder)]) == 0
    assert "Nothing had changed." in capsys.readouterr().out


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_tensors_that_changed_are_taken_for_damage_unless_it_is_said_that_they_are_meant(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (folder / MANIFEST_NAME).read_bytes()
    if name == "optimizer.pt":
        torch.save({"b": torch.ones(64)}, folder / name)
    else:
        flip_a_bit(folder / name)
    (folder / "config.json").write_text("{}")
    assert main([str(folder)]) == 1
    assert name in (told := capsys.readouterr().err) and "--tensors-too" in told
    assert (folder / MANIFEST_NAME).read_bytes() == before and damage_in(folder) != []
    assert main([str(folder), "--tensors-too"]) == 0
    assert damage_in(folder) == []


@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors", "config.json"])
def test_an_incomplete_file_is_refused_whatever_is_said(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(NotResealed, match=rf"is damaged: {name}.*Correct this"):
        reseal(folder, tensors_too=True)


def test_a_folder_that_is_no_checkpoint_is_refused_and_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.safetensors").touch()
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert main([str(folder)]) == 1
        assert f"{folder} is no checkpoint" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_folder_of_a_lightning_trainer_is_sealed_too(folder: Path) -> None:
    for name in ("trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (folder / name).unlink()
    torch.save({"epoch": 1}, folder / "lightning_state.pt")
    changes = reseal(folder)
    assert changes.added == ["lightning_state.pt"] and "optimizer.pt" in changes.gone
    assert damage_in(folder) == []


@pytest.mark.parametrize("manifest", [None, "{"])
def test_without_a_readable_manifest_the_new_one_comes_after_those_of_lower_steps(
    folder: Path, manifest: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    for step, sequence in ((3, 4), (9, 11)):
        write_checkpoint(folder.with_name(f"checkpoint-{step}"))
        write_manifest(folder.with_name(f"checkpoint-{step}"), sequence=sequence)
    (folder / MANIFEST_NAME).unlink()
    if manifest is not None:
        (folder / MANIFEST_NAME).write_text(manifest)
    assert main([str(folder)]) == 0
    assert "no readable manifest before" in capsys.readouterr().out
    assert damage_in(folder) == [] and read_manifest(folder).sequence == 4  # type: ignore[union-attr]


def test_a_failure_leaves_the_manifest_before_and_what_it_left_is_in_no_later_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (folder / MANIFEST_NAME).read_bytes()
    (folder / "config.json").write_text("{}")

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(manifest_module.os, "replace", fail)
        reseal(folder)
    assert (folder / MANIFEST_NAME).read_bytes() == before
    assert (folder / UNFINISHED_MANIFEST_NAME).exists()
    assert reseal(folder).changed == ["config.json"]
    assert damage_in(folder) == []


def test_a_folder_of_links_as_a_download_has_is_sealed_with_what_they_lead_to(folder: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in folder.iterdir():
        if path.name != MANIFEST_NAME:
            (linked / path.name).symlink_to(path)
    reseal(linked)
    flip_a_bit(folder / "optimizer.pt")
    assert damage_in(linked) == ["optimizer.pt is not as it was written (its checksum differs)."]


def test_the_command_runs_as_the_documentation_has_it(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"edited": 1}))
    command = [sys.executable, "-m", "littrainer.checkpoint.manifest", str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("changed: config.json\n") and damage_in(folder) == []
