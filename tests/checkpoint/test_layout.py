from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import trainer_utils as theirs

from littrainer.checkpoint import layout as ours

# Folder names with the modification time of each, in seconds.
FOLDERS: dict[str, dict[str, float]] = {
    "none": {},
    "one": {"checkpoint-5": 1000},
    "by step, not by name": {"checkpoint-20": 1000, "checkpoint-100": 1010, "checkpoint-3": 1020},
    "times too close to tell": {"checkpoint-30": 1000, "checkpoint-4": 1000.5, "checkpoint-10": 1000.9},
    "overwritten later": {"checkpoint-10": 1500, "checkpoint-20": 1000, "checkpoint-30": 1200},
    "among others": {"checkpoint-7": 1000, "runs": 1001, "my-checkpoint-9": 1002, "checkpoint-9-old": 1003},
}
OPTIONS: list[dict[str, Any]] = [{}, {"use_mtime": True}, {"checkpoint_prefix": "my-checkpoint"}]


def make_folders(root: Path, times: dict[str, float]) -> Path:
    root.mkdir()
    for name, seconds in times.items():
        (root / name).mkdir()
        (root / name / "file").touch()
        os.utime(root / name, (seconds, seconds))
    (root / "checkpoint-999").touch()
    return root


every_layout = pytest.mark.parametrize("times", FOLDERS.values(), ids=FOLDERS.keys())


@every_layout
def test_the_last_checkpoint_is_the_one_that_transformers_finds(tmp_path: Path, times: dict[str, float]) -> None:
    root = make_folders(tmp_path / "out", times)
    found = ours.get_last_checkpoint(str(root))
    assert found == theirs.get_last_checkpoint(str(root))
    assert ours.get_last_checkpoint(root) == found


@every_layout
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_checkpoints_are_sorted_as_transformers_sorts_them(
    tmp_path: Path, times: dict[str, float], options: dict[str, Any]
) -> None:
    root = make_folders(tmp_path / "out", times)
    for best in (None, f"{root}//checkpoint-20/", str(root / "checkpoint-30"), "checkpoint-404"):
        expected = theirs.sort_checkpoints(str(root), best_model_checkpoint=best, **options)
        assert ours.sort_checkpoints(str(root), best_model_checkpoint=best, **options) == expected, best


@every_layout
@pytest.mark.parametrize("use_mtime", [False, True])
@pytest.mark.parametrize("best", [None, "checkpoint-20", "checkpoint-404"])
def test_rotation_deletes_what_transformers_deletes(
    tmp_path: Path, times: dict[str, float], use_mtime: bool, best: str | None
) -> None:
    for limit in (None, 0, -1, 1, 2, 9):
        left = {}
        for name, library in (("ours", ours), ("theirs", theirs)):
            root = make_folders(tmp_path / f"{name} {limit}", times)
            best_folder = None if best is None else str(root / best)
            library.rotate_checkpoints(  # type: ignore[attr-defined]
                str(root), save_total_limit=limit, best_model_checkpoint=best_folder, use_mtime=use_mtime
            )
            left[name] = sorted(os.listdir(root))
        assert left["ours"] == left["theirs"], limit


@pytest.mark.parametrize(
    ("name", "step"),
    [("checkpoint-12", 12), ("out/checkpoint-0", 0), ("checkpoint-", None), ("checkpoint-1a", None), ("model", None)],
)
def test_the_step_is_read_from_a_checkpoints_name_only(name: str, step: int | None) -> None:
    assert ours.checkpoint_step(name) == ours.checkpoint_step(Path(name)) == step


def test_a_checkpoint_that_cannot_be_deleted_is_named_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_folders(tmp_path / "out", FOLDERS["by step, not by name"])

    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    ours.rotate_checkpoints(root, save_total_limit=2)
    assert "checkpoint-3" in caplog.text and "Permission denied" in caplog.text


@pytest.mark.parametrize(
    "name",
    [
        "PREFIX_CHECKPOINT_DIR",
        "WEIGHTS_NAME",
        "SAFE_WEIGHTS_NAME",
        "SAFE_WEIGHTS_INDEX_NAME",
        "TRAINER_STATE_NAME",
        "TRAINING_ARGS_NAME",
        "OPTIMIZER_NAME",
        "SCHEDULER_NAME",
        "SCALER_NAME",
    ],
)
def test_files_have_the_names_they_have_in_transformers(name: str) -> None:
    import transformers.trainer
    import transformers.utils

    homes = (transformers.trainer, transformers.utils, theirs)
    assert getattr(ours, name) == next(getattr(home, name) for home in homes if hasattr(home, name))
