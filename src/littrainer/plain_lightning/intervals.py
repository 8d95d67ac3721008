"""Callbacks that let a `lightning.Trainer` validate and save at the optimizer steps at which a Trainer does.

Lightning's own intervals count micro-batches, over the ends of epochs, at which a window may be short.
"""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

# Micro-batches after which Lightning validates, where it is not to.
NEVER = sys.maxsize


class DueSteps:
    """The optimizer steps at which something is done: each multiple of an interval, and the last one.

    Parameters:
        every: optimizer steps.
        not_before: the first step at which it may be done.
    """

    def __init__(self, every: int, not_before: float = 0):
        self.every, self.not_before = every, not_before
        self._steps_before = 0

    def begin_micro_batch(self, trainer: pl.Trainer) -> None:
        """Note where the count stands, since not each micro-batch ends an optimizer step."""
        self._steps_before = trainer.global_step

    def are_reached(self, trainer: pl.Trainer) -> bool:
        """Whether the micro-batch that has ended took such a step."""
        step = trainer.global_step
        if step == self._steps_before or step < self.not_before:
            return False
        return step % self.every == 0 or _is_last(trainer)


def _is_last(trainer: pl.Trainer) -> bool:
    if trainer.global_step == trainer.max_steps:
        return True
    return _ends_epoch(trainer) and trainer.current_epoch + 1 == trainer.max_epochs


def _ends_epoch(trainer: pl.Trainer) -> bool:
    behind = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return bool(trainer.is_last_batch or behind == trainer.num_training_batches)


class ValidatesAtSteps(pl.Callback):
    """Lets `fit` validate at optimizer steps.

    Parameters:
        steps: these.
    """

    def __init__(self, steps: DueSteps):
        self.steps = steps
        # Whether a validation follows the micro-batch that has ended.
        self.is_due = False

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Nothing is due until a step has been taken, in an epoch that is gone on with either."""
        trainer.val_check_batch = NEVER

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """A micro-batch begins."""
        self.steps.begin_micro_batch(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Lightning asks next whether the number of micro-batches is a multiple of this."""
        self.is_due = self.steps.are_reached(trainer)
        trainer.val_check_batch = 1 if self.is_due else NEVER


class ValidatesOutsideFitOnly(pl.Callback):
    """Keeps `fit` from validating; `validate` has its data all the same."""

    def __init__(self) -> None:
        self._limit: Any = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Before Lightning looks for data."""
        if stage == TrainerFn.FITTING:
            self._limit, trainer.limit_val_batches = trainer.limit_val_batches, 0

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Fit has ended."""
        self._put_back(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """It has failed, and is not torn down."""
        self._put_back(trainer)

    def _put_back(self, trainer: pl.Trainer) -> None:
        if self._limit is not None:
            trainer.limit_val_batches, self._limit = self._limit, None


class SavesAsTrainer(ModelCheckpoint):
    """Saves when a Trainer does, after the validation of the same step, and after the epoch that ends with it.

    Between an epoch's last validation and its end Lightning writes what it does not go on from in each case.

    Parameters:
        steps: those at which to save; None saves at the ends of epochs.
        validation: what validates at optimizer steps; None where that happens at the ends of epochs, or not at all.
        only_best: save only what is better than all before by `monitor`, whenever there has been a validation.
        settings: further keywords of a `ModelCheckpoint`.
    """

    def __init__(
        self, steps: DueSteps | None, validation: ValidatesAtSteps | None, only_best: bool = False, **settings: Any
    ):
        # So its hook at the end of an epoch saves, and no other one.
        super().__init__(every_n_epochs=1, save_on_train_epoch_end=True, **settings)
        self.steps, self.validation, self.only_best = steps, validation, only_best
        self._is_due = False

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """A micro-batch begins."""
        if self.steps is not None:
            self.steps.begin_micro_batch(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save at a step, unless a validation is to come first."""
        self._is_due = self.steps is not None and self.steps.are_reached(trainer)
        validation_follows = self.validation is not None and self.validation.is_due
        if self._is_due and not validation_follows and not _ends_epoch(trainer):
            self._save(trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save what waited for it, with its metrics."""
        if self.validation is not None and (self._is_due or self.only_best) and not _ends_epoch(trainer):
            self._save(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save, where that is the time for it, or the last step has waited for it."""
        if self.steps is not None:
            is_due = self._is_due
        else:
            is_due = not self.only_best or self.validation is None or self.validation.is_due
        if is_due:
            self._save(trainer, pl_module)

    def _save(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)

    def check_monitor_top_k(self, trainer: pl.Trainer, current: torch.Tensor | None = None) -> bool:
        """Whether a value of the metric is to be saved.

        Parameters:
            trainer: has validated.
            current: the value.
        """
        best = self.best_model_score
        if self.only_best and best is not None and current is not None:
            is_better = current > best if self.mode == "max" else current < best
            if not trainer.strategy.reduce_boolean_decision(bool(is_better)):
                return False
        return super().check_monitor_top_k(trainer, current)
