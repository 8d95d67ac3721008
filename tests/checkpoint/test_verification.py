from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from littrainer.checkpoint import verification
from littrainer.checkpoint.checksums import write_manifest
from littrainer.checkpoint.verification import find_damage, find_edits

STATES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")


def write_checkpoint(folder: Path) -> Path:
    """Write a checkpoint without manifest, like transformers."""
    folder.mkdir()
    save_file({"a": torch.arange(64.0)}, folder / "model.safetensors")
    for name in (*STATES, "training_args.bin"):
        torch.save({"b": torch.arange(64.0)}, folder / name)
    for name in ("trainer_state.json", "config.json"):
        (folder / name).write_text(json.dumps({"global_step": 5}))
    return folder


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint-5")


@pytest.fixture
def ours(foreign: Path) -> Path:
    (foreign / "README.md").write_text("card")
    (foreign / "vocab.txt").write_text("one\ntwo")
    write_manifest(foreign)
    return foreign


def test_complete_checkpoints_have_no_damage(foreign: Path) -> None:
    assert find_damage(foreign) == []
    os.rename(foreign / "rng_state.pth", foreign / "rng_state_0.pth")
    assert find_damage(foreign) == []
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth"):
        (foreign / name).unlink()
    assert find_damage(foreign) == [], "of the model only"
    write_manifest(foreign)
    assert find_damage(foreign) == []


def test_files_that_no_resume_reads_may_change(ours: Path) -> None:
    (ours / "README.md").write_text("edited")
    (ours / "training_args.bin").unlink()
    (ours / ".cache").mkdir()
    (ours / ".cache" / "download").touch()
    assert find_damage(ours) == find_edits(ours) == []


def replace_by_shards(folder: Path) -> None:
    write_shards(folder, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})


def replace_shards_by_file(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    replace_by_shards(folder)
    write_manifest(folder)
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "model.safetensors").write_bytes(weights)


TWO_SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"
EDITS: dict[str, tuple[Callable[[Path], object], dict[str, list[str]]]] = {
    "a state": (
        lambda folder: (folder / "trainer_state.json").write_text('{"global_step": 5, "save_steps": 7}'),
        {"changed": ["trainer_state.json"]},
    ),
    "a configuration": (lambda folder: (folder / "config.json").write_text("{}"), {"changed": ["config.json"]}),
    "a text": (lambda folder: (folder / "vocab.txt").write_text("one\ntwo\nthree"), {"changed": ["vocab.txt"]}),
    "an added file": (lambda folder: (folder / "notes.txt").touch(), {"added": ["notes.txt"]}),
    "shards": (replace_by_shards, {"added": [*TWO_SHARDS, INDEX], "gone": ["model.safetensors"]}),
    "no shards": (replace_shards_by_file, {"added": ["model.safetensors"], "gone": [*TWO_SHARDS, INDEX]}),
}


@pytest.mark.parametrize(("edit", "expected"), EDITS.values(), ids=EDITS.keys())
def test_edits_of_a_complete_checkpoint_are_no_damage(
    ours: Path, edit: Callable[[Path], object], expected: dict[str, list[str]]
) -> None:
    edit(ours)
    assert find_damage(ours) == []
    edits = [f"{name} {how}" for how, names in expected.items() for name in names]
    assert sorted(find_edits(ours)) == sorted(edits)


DAMAGED_TEXTS: dict[str, tuple[str, bytes, str]] = {
    "no JSON": ("config.json", b'{"a": ', "is damaged: it is no readable JSON"),
    "deep JSON": ("config.json", b"[" * 200_000, "is damaged: it is no readable JSON (maximum recursion"),
    "half a state": ("trainer_state.json", b'{"global_step": 5', "is damaged: it is no readable state (Expecting"),
    "another step": ("trainer_state.json", b'{"global_step": 6}', "is damaged: global_step is 6 in checkpoint-5"),
    "no step": ("trainer_state.json", b"{}", "is damaged: it is no readable state (global_step is"),
    "no state": ("trainer_state.json", b"[]", "is damaged: it is no readable state (it holds no object"),
    "a short text": ("vocab.txt", b"one", "has 3 bytes and was written with 7"),
    "no text": ("vocab.txt", b"one\n\xf4wo", "is not as it was written (its checksum differs)"),
    "no weights": ("model.safetensors", b"", "has 0 bytes and was written with 328"),
    "a broken addition": ("adapter_model.safetensors", b"", "is damaged: its header is not readable"),
}


@pytest.mark.parametrize(("name", "content", "sentence_start"), DAMAGED_TEXTS.values(), ids=DAMAGED_TEXTS.keys())
def test_truncated_and_unparsable_files_are_damage(ours: Path, name: str, content: bytes, sentence_start: str) -> None:
    (ours / name).write_bytes(content)
    (sentence,) = find_damage(ours)
    assert sentence.startswith(f"{name} {sentence_start}")


@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "trainer_state.json", "optimizer.pt"])
def test_a_read_error_is_damage_while_it_lasts(foreign: Path, name: str, has_manifest: bool) -> None:
    if has_manifest:
        write_manifest(foreign)
    original = (foreign / name).rename(foreign.parent / name)
    # Reading is an I/O error.
    (foreign / name).symlink_to("/proc/self/mem")
    damage = find_damage(foreign)
    assert damage and all(text.startswith(f"{name} ") and "Input/output error" in text for text in damage)
    (foreign / name).unlink()
    original.rename(foreign / name)
    assert find_damage(foreign) == []


@pytest.mark.parametrize("odd", ['{"a": 5}', "5", "[" * 200_000])
def test_an_invalid_index_is_damage(foreign: Path, odd: str) -> None:
    (foreign / INDEX).write_text(odd if odd[0] == "[" else f'{{"weight_map": {odd}}}')
    damage = find_damage(foreign)
    assert damage and all(INDEX in sentence for sentence in damage)


@pytest.mark.parametrize("missing", [*TWO_SHARDS, INDEX])
def test_shards_that_replace_a_file_have_to_be_complete(ours: Path, missing: str) -> None:
    replace_by_shards(ours)
    (ours / missing).unlink()
    assert find_damage(ours) == ["model.safetensors is missing."]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES: dict[str, Callable[[Path], object]] = {"emptied": lambda path: path.write_bytes(b""), "halved": truncate}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.parametrize(
    "name", ["model.safetensors", "trainer_state.json", "config.json", "littrainer_resume.pt", *STATES]
)
def test_an_incomplete_file_is_damage_without_manifest(
    foreign: Path, name: str, damage: Callable[[Path], object]
) -> None:
    torch.save({}, foreign / "littrainer_resume.pt")
    damage(foreign / name)
    (sentence,) = find_damage(foreign)
    assert sentence.startswith(f"{name} is damaged: ")


@pytest.mark.parametrize("name", ["model.safetensors", *STATES])
def test_flipped_bits_are_damage_without_manifest_if_the_format_has_checksums(foreign: Path, name: str) -> None:
    data = (foreign / name).read_bytes()
    # safetensors has no checksums.
    at = 0 if name == "model.safetensors" else data.index(torch.arange(64.0).numpy().tobytes())
    for byte in (0, at, at + 5):
        changed = bytearray(data)
        changed[byte] ^= 16
        (foreign / name).write_bytes(changed)
        assert [sentence.split()[0] for sentence in find_damage(foreign)] == [name], byte


@pytest.mark.parametrize("name", ["model.safetensors", "trainer_state.json", *STATES])
def test_a_missing_file_is_damage_without_manifest(foreign: Path, name: str) -> None:
    (foreign / name).unlink()
    (sentence,) = find_damage(foreign)
    assert name in sentence


def write_shards(folder: Path, files: dict[str, str]) -> None:
    (folder / "model.safetensors").unlink(missing_ok=True)
    for file in files.values():
        if "/" not in file:
            save_file({"a": torch.ones(2)}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


ODD_FIELDS: dict[str, object] = {
    "epoch": math.nan,
    "max_steps": "x",
    "log_history": 5,
    "best_model_checkpoint": [],
    "stateful_callbacks": {"TrainerControl": 5},
}


@pytest.mark.parametrize("name", ODD_FIELDS)
def test_a_trainer_state_with_fields_of_other_types_is_damage(foreign: Path, name: str) -> None:
    (foreign / "trainer_state.json").write_text(json.dumps({"global_step": 5, name: ODD_FIELDS[name]}))
    (damage,) = find_damage(foreign)
    assert damage.startswith("trainer_state.json is damaged: ") and name in damage


def test_several_callbacks_of_a_class_in_a_state_are_no_damage(foreign: Path) -> None:
    state = {"global_step": 5, "stateful_callbacks": {"Counts": [{"args": {}}, {"args": {}}]}}
    (foreign / "trainer_state.json").write_text(json.dumps(state))
    assert find_damage(foreign) == []


@pytest.mark.parametrize("with_manifest", [True, False])
def test_a_copy_under_the_name_of_another_step_is_damaged_and_a_link_to_a_checkpoint_is_not(
    foreign: Path, with_manifest: bool
) -> None:
    if with_manifest:
        write_manifest(foreign)
    copy, link, other = (foreign.with_name(name) for name in ("checkpoint-6", "checkpoint-7", "last-checkpoint"))
    shutil.copytree(foreign, copy)
    shutil.copytree(foreign, other)
    link.symlink_to(foreign)
    assert find_damage(copy) == ["trainer_state.json is damaged: global_step is 5 in checkpoint-6."]
    assert find_damage(link) == find_damage(other) == []


def test_a_missing_shard_is_damage(foreign: Path) -> None:
    write_shards(foreign, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    assert find_damage(foreign) == []
    (foreign / "model-2.safetensors").unlink()
    assert find_damage(foreign) == ["model-2.safetensors, a shard in model.safetensors.index.json, is missing."]


def test_weights_in_torchs_legacy_format_are_no_damage(foreign: Path) -> None:
    (foreign / "model.safetensors").unlink()
    torch.save({"a": torch.ones(2)}, foreign / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert find_damage(foreign) == []


def test_user_files_in_other_formats_are_not_checked(foreign: Path) -> None:
    for name in ("vectors.bin", "state.pt", "notes.json"):
        (foreign / name).write_text("something else")
    assert find_damage(foreign) == []


def test_an_unchanged_checkpoint_is_verified_once(ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_damage(ours) == []
    with monkeypatch.context() as patch:
        patch.setattr(verification, "file_record", lambda path: pytest.fail(f"{path} is read again"))
        assert find_damage(ours) == []
    (ours / "optimizer.pt").write_bytes(b"")
    (ours / "config.json").write_text("")
    assert [sentence.split()[0] for sentence in find_damage(ours)] == ["config.json", "optimizer.pt"]


@pytest.mark.parametrize("kind", ["foreign", "ours"])
def test_links_are_verified_by_their_targets(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    blobs = tmp_path / "blobs"
    folder.rename(blobs)
    folder.mkdir()
    for file in blobs.iterdir():
        (folder / file.name).symlink_to(file)
    weights, away = blobs / "model.safetensors", tmp_path / "away"
    assert find_damage(folder) == []
    weights.rename(away)
    assert len(find_damage(folder)) == 1
    away.rename(weights)
    assert find_damage(folder) == []
