"""Lightning callbacks resume with their state at the checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    SpikeDetection,
    StochasticWeightAveraging,
)

from littrainer import Trainer
from tests.scenarios.metrics import accuracy
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

BOTH_MODES = pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer])
# Nine optimizer steps in three epochs, each with a checkpoint.
SAVING = {"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}


def train(folder: Path, *callbacks: Any, resume: int | None = None, **changes: Any) -> Trainer:
    kwargs = {"callbacks": list(callbacks), "compute_metrics": accuracy}
    trainer = quiet_trainer(folder, trainer_kwargs=kwargs, **{**SAVING, **changes})
    trainer.train(resume_from_checkpoint=None if resume is None else str(folder / f"checkpoint-{resume}"))
    return trainer


def get_history_without_times(trainer: Trainer) -> list[dict[str, Any]]:
    history = trainer.state.log_history[:-1]
    return [{name: entry[name] for name in entry if not name.endswith(("_runtime", "per_second"))} for entry in history]


@BOTH_MODES
@pytest.mark.parametrize(
    "make",
    [
        lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=2),
        lambda: EMAWeightAveraging(decay=0.7),
    ],
)
def test_a_resumed_training_with_weight_averaging_equals_an_uninterrupted_one(
    tmp_path: Path, make: Any, kind: Any
) -> None:
    full = train(tmp_path, make(), kind=kind)
    resumed = train(tmp_path, make(), resume=4, kind=kind)
    for expected, actual in zip(full.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(expected, actual)
    assert get_history_without_times(full) == get_history_without_times(resumed)


class Counting(pl.Callback):
    def __init__(self) -> None:
        self.counts: list[tuple[int, int]] = []
        self.loaded: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.counts.append((trainer.current_epoch, trainer.global_step))

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["counts"] = self.counts

    def on_load_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint


@BOTH_MODES
def test_lightnings_counts_continue_and_callbacks_load_their_additions_to_checkpoints(
    tmp_path: Path, kind: Any
) -> None:
    full, resumed = Counting(), Counting()
    train(tmp_path, full, kind=kind)
    train(tmp_path, resumed, resume=4, kind=kind)
    assert full.counts == [(step // 3, step) for step in range(9)]
    assert resumed.counts == full.counts[4:]
    assert resumed.loaded["counts"] == full.counts[:4] and resumed.loaded["global_step"] == 4


def test_a_callback_that_cannot_load_its_state_begins_without_state_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, SpikeDetection(), max_steps=2)
    assert train(tmp_path, SpikeDetection(), resume=2, max_steps=4).state.global_step == 4
    assert "SpikeDetection cannot load its state" in caplog.text


def test_an_unsafe_state_is_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Unsafe(pl.Callback):
        loaded = False

        def state_dict(self) -> dict[str, Any]:
            return {"logger": logging.getLogger()}

        def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["custom"] = logging.getLogger()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded = True

    train(tmp_path, Unsafe(), max_steps=1)
    callback = Unsafe()
    train(tmp_path, callback, resume=1, max_steps=2)
    assert not callback.loaded
    for method in ("state_dict()", "on_save_checkpoint"):
        assert f"What Unsafe.{method} gives is not kept" in caplog.text


def test_fine_tuning_callbacks_cannot_be_resumed(tmp_path: Path) -> None:
    class Freezing(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.model.inner)

        def finetune_function(self, *_: Any) -> None: ...

    train(tmp_path, Freezing(), max_steps=1)
    with pytest.raises(ValueError, match="Freezing cannot be resumed"):
        train(tmp_path, Freezing(), resume=1, max_steps=2)
