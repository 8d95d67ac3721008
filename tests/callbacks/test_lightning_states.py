"""Lightning callbacks go on, in a resumed training, from where they stood at the checkpoint."""

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
# Three optimizer steps an epoch; a checkpoint at each of nine.
SAVING = {"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}


def trained(folder: Path, *callbacks: Any, resume: int | None = None, **changes: Any) -> Trainer:
    given = {"callbacks": list(callbacks), "compute_metrics": accuracy}
    trainer = quiet_trainer(folder, given=given, **{**SAVING, **changes})
    trainer.train(resume_from_checkpoint=None if resume is None else str(folder / f"checkpoint-{resume}"))
    return trainer


def timeless(trainer: Trainer) -> list[dict[str, Any]]:
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
def test_a_training_resumed_while_weights_are_averaged_ends_as_the_one_in_one_go(
    tmp_path: Path, make: Any, kind: Any
) -> None:
    whole = trained(tmp_path, make(), kind=kind)
    resumed = trained(tmp_path, make(), resume=4, kind=kind)
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert timeless(whole) == timeless(resumed)


class Counting(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.kept: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen.append((trainer.current_epoch, trainer.global_step))

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.kept = checkpoint


@BOTH_MODES
def test_lightning_counts_on_and_callbacks_get_back_what_they_add_to_checkpoints(tmp_path: Path, kind: Any) -> None:
    whole, resumed = Counting(), Counting()
    trained(tmp_path, whole, kind=kind)
    trained(tmp_path, resumed, resume=4, kind=kind)
    assert whole.seen == [(step // 3, step) for step in range(9)]
    assert resumed.seen == whole.seen[4:]
    assert resumed.kept["seen"] == whole.seen[:4] and resumed.kept["global_step"] == 4


def test_a_callback_that_cannot_take_its_state_back_begins_anew_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path, SpikeDetection(), max_steps=2)
    assert trained(tmp_path, SpikeDetection(), resume=2, max_steps=4).state.global_step == 4
    assert "SpikeDetection does not take back its state" in caplog.text


def test_a_state_that_could_not_be_loaded_safely_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Unsafe(pl.Callback):
        loaded = False

        def state_dict(self) -> dict[str, Any]:
            return {"logger": logging.getLogger()}

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["own"] = logging.getLogger()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded = True

    trained(tmp_path, Unsafe(), max_steps=1)
    callback = Unsafe()
    trained(tmp_path, callback, resume=1, max_steps=2)
    assert not callback.loaded
    for where in ("state_dict()", "on_save_checkpoint"):
        assert f"What Unsafe.{where} gives is not kept" in caplog.text


def test_fine_tuning_callbacks_cannot_be_resumed(tmp_path: Path) -> None:
    class Freezing(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.model.inner)

        def finetune_function(self, *_: Any) -> None: ...

    trained(tmp_path, Freezing(), max_steps=1)
    with pytest.raises(ValueError, match="Freezing cannot be resumed"):
        trained(tmp_path, Freezing(), resume=1, max_steps=2)
