"""From Lightning's hooks to the Trainer's events."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from littrainer.data.windows import MicroBatch
from littrainer.interruptions import carries_stop_iteration
from littrainer.training.run import TrainingRun


class TrainerEvents(pl.Callback):
    """Tells a training what Lightning is about to do or has done, and Lightning when to stop.

    Parameters:
        run: the training.
    """

    def __init__(self, run: TrainingRun):
        self.run = run

    @carries_stop_iteration
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Model and optimizer are set up."""
        self.run.begin()
        self._stop_if_asked(trainer)
        if self.run.evaluation_due is not None:
            self._stop_if_asked(trainer)

    @carries_stop_iteration
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """An epoch comes next."""
        self.run.begin_epoch(trainer.current_epoch)

    @carries_stop_iteration
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: MicroBatch, batch_idx: int) -> None:
        """A micro-batch comes next."""
        pl_module.follow_window(batch)
        self.run.begin_micro_batch(batch)

    @carries_stop_iteration
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: MicroBatch, batch_idx: int
    ) -> None:
        """A micro-batch is done, the optimizer and its schedule have stepped where it was the last of its window."""
        self.run.end_micro_batch(batch)
        self._stop_if_asked(trainer)

    @carries_stop_iteration
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """An epoch is done."""
        self.run.end_epoch()
        self._stop_if_asked(trainer)

    def _stop_if_asked(self, trainer: pl.Trainer) -> None:
        if self.run.trainer.control.should_training_stop:
            trainer.should_stop = True
