from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from littrainer import Trainer, TrainerCallback
from littrainer.checkpoint import retention
from littrainer.checkpoint.atomic_write import clean_staging_dir
from littrainer.checkpoint.checksums import Manifest, write_manifest
from littrainer.checkpoint.manager import CheckpointManager
from littrainer.checkpoint.retention import rotate_checkpoints, thin_checkpoint
from littrainer.checkpoint.verification import find_damage, find_edits, read_manifest_or_empty
from tests.checkpoint.test_atomic_write import Kill, Killed
from tests.checkpoint.test_finite_weights import make_checkpoints
from tests.checkpoint.test_writer import names_in
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

EACH_STEP: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
RESUME_FILES = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "littrainer_resume.pt"}


def steps_in(run_dir: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in run_dir.glob("checkpoint-*"))


def is_thinned(folder: Path) -> bool:
    return read_manifest_or_empty(folder).is_thinned


# ---- The newest finite checkpoint ------------------------------------------------------------------------------------

FINITE: dict[str, tuple[dict[int, bool | None], int, list[int]]] = {
    "all newer ones are non-finite": ({1: True, 2: True, 3: False, 4: False, 5: False}, 2, [2, 4, 5]),
    "a remaining one is finite": ({1: True, 2: True, 3: True, 4: False}, 2, [3, 4]),
    "unknown, as in transformers' checkpoints": ({1: None, 2: None, 3: None}, 1, [3]),
    "none is finite": ({1: False, 2: False, 3: False}, 1, [3]),
}


@pytest.mark.parametrize(("finite", "limit", "remaining"), FINITE.values(), ids=FINITE.keys())
def test_rotation_keeps_the_newest_finite_checkpoint(
    tmp_path: Path, finite: dict[int, bool | None], limit: int, remaining: list[int]
) -> None:
    make_checkpoints(tmp_path, finite)
    rotate_checkpoints(tmp_path, save_total_limit=limit, use_mtime=True)
    assert steps_in(tmp_path) == remaining


# ---- The best checkpoints --------------------------------------------------------------------------------------------


def train_with_scores(folder: Path, scores: Iterable[float], resume: bool = False, **changes: Any) -> Trainer:
    """Train one step, with an evaluation and a save, for each score."""
    remaining = iter([*scores])
    settings = {"metric_for_best_model": "score", "save_total_limit_best": 2, **EACH_STEP, **changes}
    trainer = quiet_trainer(
        folder, rows=40, trainer_kwargs={"compute_metrics": lambda _: {"score": next(remaining)}}, **settings
    )
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


SCORES = (0.5, 0.9, 0.1, 0.8, 0.2, 0.3)
BEST_CHECKPOINTS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "and the newest": ({}, [2, 4, 6]),
    "and as many of the newest as the limit says": ({"save_total_limit": 3}, [2, 4, 5, 6]),
    "with all, if that is what the limit says": ({"save_total_limit": -1}, [1, 2, 3, 4, 5, 6]),
    "in the background": ({"async_save": True, "save_total_limit": 1}, [2, 4, 6]),
    "with the smallest value": ({"greater_is_better": False}, [3, 5, 6]),
    "with the best model, which no limit deletes": ({"save_total_limit": 1, "load_best_model_at_end": True}, [2, 4, 6]),
    "that are among the newest": ({"save_total_limit": 5, "save_total_limit_best": 1}, [2, 3, 4, 5, 6]),
}


@pytest.mark.parametrize(("changes", "remaining"), BEST_CHECKPOINTS.values(), ids=BEST_CHECKPOINTS.keys())
def test_rotation_keeps_the_best_checkpoints(tmp_path: Path, changes: dict[str, Any], remaining: list[int]) -> None:
    train_with_scores(tmp_path, SCORES, max_steps=6, **changes)
    assert steps_in(tmp_path) == remaining


def test_a_resumed_training_keeps_the_best_earlier_checkpoints(tmp_path: Path) -> None:
    train_with_scores(tmp_path, SCORES[:4], max_steps=4)
    train_with_scores(tmp_path, (math.nan, 0.8), resume=True, max_steps=6)
    assert steps_in(tmp_path) == [2, 4, 6], "of equal ones the earlier, and none that is not a number"


def test_save_total_limit_best_defaults_to_the_loss_and_needs_evaluations(tmp_path: Path) -> None:
    args = quiet_arguments(tmp_path, save_total_limit_best=1, **EACH_STEP)
    assert args.metric_for_best_model == "loss" and args.greater_is_better is False
    for changes, words in (
        ({"eval_strategy": "no"}, "set both to the same value"),
        ({"save_steps": 3, "eval_steps": 2}, "not a multiple of eval_steps=2"),
        ({"save_total_limit_best": 0}, "save_total_limit_best=0 is out of range"),
        ({"save_strategy": "no", "eval_strategy": "no"}, 'has nothing to keep with save_strategy="no"'),
    ):
        with pytest.raises(ValueError, match=words) as error:
            quiet_arguments(tmp_path, **{"save_total_limit_best": 1, **EACH_STEP, **changes})
        assert "save_total_limit_best" in str(error.value)


# ---- Thinned checkpoints ---------------------------------------------------------------------------------------------


def test_keep_optimizer_states_is_refused_with_save_only_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep_optimizer_states has nothing to keep with save_only_model=True"):
        quiet_arguments(tmp_path, keep_optimizer_states=1, save_only_model=True)


@pytest.mark.parametrize("in_background", [False, True])
def test_older_checkpoints_are_thinned_to_their_weights_and_stay_intact(tmp_path: Path, in_background: bool) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    quiet_trainer(tmp_path / "whole", **saving).train()
    run = tmp_path / "run"
    quiet_trainer(run, keep_optimizer_states=2, async_save=in_background, **saving).train()
    assert steps_in(run) == [1, 2, 3, 4] and ".unfinished" not in names_in(run)
    for step in (1, 2, 3, 4):
        ours, all_files = run / f"checkpoint-{step}", names_in(tmp_path / "whole" / f"checkpoint-{step}")
        assert names_in(ours) == (all_files - RESUME_FILES if step < 3 else all_files)
        assert find_damage(ours) == find_edits(ours) == [] and is_thinned(ours) is (step < 3)
    resumed = quiet_trainer(run, keep_optimizer_states=2, **saving)
    resumed.train(resume_from_checkpoint=str(run / "checkpoint-3"))
    for name, weight in load_file(tmp_path / "whole" / "checkpoint-4" / "model.safetensors").items():
        assert torch.equal(resumed.model.state_dict()[name], weight)


def test_a_thinned_checkpoint_cannot_be_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quiet_trainer(tmp_path, keep_optimizer_states=1, max_steps=3, save_strategy="steps", save_steps=1).train()
    with pytest.raises(ValueError, match=r"checkpoint-2 was thinned .* Resume from .*checkpoint-3, or load"):
        CheckpointManager().find(str(tmp_path / "checkpoint-2"), str(tmp_path))
    newest = tmp_path / "checkpoint-3"
    newest.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="Resume from a complete one"):
        CheckpointManager().find(str(tmp_path / "checkpoint-2"), str(tmp_path))
    caplog.clear()
    with pytest.raises(ValueError, match="there is no intact"):
        CheckpointManager().find(True, str(tmp_path))
    assert not caplog.messages


def test_the_best_model_is_loaded_from_a_thinned_checkpoint(tmp_path: Path) -> None:
    settings = {"save_total_limit_best": None, "load_best_model_at_end": True, "learning_rate": 0.3}
    trainer = train_with_scores(tmp_path, (0.9, 0.1, 0.2), max_steps=3, keep_optimizer_states=1, **settings)
    best = tmp_path / "checkpoint-1"
    assert is_thinned(best) and trainer.state.best_model_checkpoint == str(best)
    for name, weight in load_file(best / "model.safetensors").items():
        assert torch.equal(trainer.model.state_dict()[name], weight)


def test_the_newest_finite_checkpoint_is_not_thinned(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, keep_optimizer_states=1, max_steps=3, save_strategy="steps", save_steps=1)

    class Harm(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                trainer.model.head.bias.data.fill_(math.nan)

    trainer.add_callback(Harm())
    trainer.train()
    assert [is_thinned(tmp_path / f"checkpoint-{step}") for step in (1, 2, 3)] == [False, True, False]


def make_fsdp_checkpoint(folder: Path) -> Path:
    """Make files with the names in a FSDP checkpoint of two processes."""
    (folder / "optimizer_0").mkdir(parents=True)
    (folder / "optimizer_0" / ".metadata").write_text("index")
    states = ["optimizer_0/__0_0.distcp", "optimizer.bin", "scheduler.pt", "scaler.pt"]
    states += ["rng_state_0.pth", "rng_state_1.pth", "littrainer_resume.pt", "littrainer_resume_1.pt"]
    for name in states:
        torch.save({}, folder / name)
    (folder / "pytorch_model_fsdp.bin").write_text("weights")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 4}))
    write_manifest(folder, sequence=3, weights_are_finite=True)
    return folder


def test_a_kill_during_thinning_leaves_the_checkpoint_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    ends = []
    for after in itertools.count():
        folder = make_fsdp_checkpoint(tmp_path / str(after) / "checkpoint-4")
        complete = names_in(folder)
        with monkeypatch.context() as patch:
            kill = Kill(patch, after)
            with contextlib.suppress(Killed):
                thin_checkpoint(folder)
        assert find_damage(folder) == [], after
        assert is_thinned(folder) or find_edits(folder) == [], after
        assert is_thinned(folder) or names_in(folder) >= complete, after
        ends.append(is_thinned(folder))
        clean_staging_dir(folder.parent)
        thin_checkpoint(folder)
        remaining = {"pytorch_model_fsdp.bin", "trainer_state.json", "littrainer_manifest.json"}
        assert names_in(folder) - {"littrainer_manifest.json.unfinished"} == remaining, after
        assert find_damage(folder) == find_edits(folder) == [] and names_in(folder.parent) == {"checkpoint-4"}, after
        if kill.calls <= after:
            break
    assert list(dict.fromkeys(ends)) == [False, True]


def test_links_and_checkpoints_without_manifest_are_not_thinned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_fsdp_checkpoint(tmp_path / "checkpoint-4")
    before = names_in(folder)
    (tmp_path / "checkpoint-5").symlink_to(folder)
    thin_checkpoint(tmp_path / "checkpoint-5")
    (folder / "littrainer_manifest.json").write_text("{")
    thin_checkpoint(folder)
    assert "could not be thinned" in caplog.text
    (folder / "littrainer_manifest.json").unlink()
    thin_checkpoint(folder)
    assert names_in(folder) == before - {"littrainer_manifest.json"}


def test_rotation_skips_a_checkpoint_that_a_user_deletes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delete_and_read(path: Path) -> Manifest:
        if path.name == "checkpoint-2" and path.exists():
            shutil.rmtree(path)
        return read_manifest_or_empty(path)

    make_checkpoints(tmp_path, {1: True, 2: True, 3: True, 4: True})
    monkeypatch.setattr(retention, "read_manifest_or_empty", delete_and_read)
    rotate_checkpoints(tmp_path, save_total_limit=2, use_mtime=True)
    assert steps_in(tmp_path) == [3, 4]


def test_nothing_is_deleted_if_the_best_checkpoint_is_missing(tmp_path: Path) -> None:
    make_checkpoints(tmp_path, {1: True, 2: True})
    arguments = quiet_arguments(tmp_path, save_total_limit=1)
    CheckpointManager().delete_all_but_best(arguments, str(tmp_path), str(tmp_path / "checkpoint-3"))
    assert steps_in(tmp_path) == [1, 2]
