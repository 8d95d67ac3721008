"""Damaged checkpoints; `python -m tests.faults.damage` resumes from all of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from littrainer.checkpoint.verification import find_damage, find_edits
from tests.faults.damage import DAMAGED, DAMAGES, Matrix

# Files that no resume reads; and without manifest a checkpoint is like those of transformers.
HARMLESS = {("training_args.bin", name) for name in DAMAGES} | {("littrainer_manifest.json", "deleted")}
# Texts in which a flipped bit may be an edit.
EDITED = {"config.json", "trainer_state.json"}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("matrix"), "littrainer", "littrainer")


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_to_any_file_is_reported(matrix: Matrix, tmp_path: Path, name: str) -> None:
    assert len(matrix.files) >= 9
    for file in matrix.files:
        folder = tmp_path / file
        shutil.copytree(matrix.root / "stopped" / DAMAGED, folder)
        DAMAGES[name](folder / file)
        damage = find_damage(folder)
        if name == "bit flipped" and file in EDITED:
            assert damage or find_edits(folder) == [f"{file} changed"]
        elif (file, name) in HARMLESS:
            assert damage == []
        else:
            assert len(damage) == 1 and damage[0].startswith(file), file


FEW: list[tuple[str, Callable[[Path], object], bool, str]] = [
    ("model.safetensors", DAMAGES["bit flipped"], False, "earlier"),
    ("optimizer.pt", DAMAGES["deleted"], False, "earlier"),
    ("rng_state.pth", DAMAGES["halved"], True, "error"),
    ("littrainer_manifest.json", DAMAGES["deleted"], True, "exact"),
]


@pytest.mark.parametrize(("file", "damage", "by_name", "outcome"), FEW, ids=[case[0] for case in FEW])
def test_a_resume_is_exact_or_refused(
    matrix: Matrix, file: str, damage: Callable[[Path], object], by_name: bool, outcome: str
) -> None:
    assert matrix.outcome(file, damage, by_name) == outcome


def test_the_comparison_detects_different_weights(matrix: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    assert matrix.outcome("model.safetensors", lambda path: None, True) == "exact"
    monkeypatch.setattr(matrix, "expected", {name: tensor + 1 for name, tensor in matrix.expected.items()})
    assert matrix.outcome("model.safetensors", lambda path: None, True) == "different"
