"""Averaged weights (`ema_decay`): Lightning's callback, and which weights a Trainer evaluates and saves (`ema_use`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch

from littrainer.callbacks.lightning_states import IS_EXCHANGED

try:
    from lightning.pytorch.callbacks import WeightAveraging
except ImportError as error:
    raise ImportError(
        f"ema_decay needs Lightning's WeightAveraging, which Lightning {pl.__version__} does not have: run "
        "`pip install 'lightning>=2.6'`, or leave ema_decay unset."
    ) from error


class AveragedWeights(WeightAveraging):
    """Keeps an exponential moving average of weights and buffers, and lends it to evaluations and checkpoints.

    A checkpoint holds both: the weights that are saved in the model's file, the others in the resume record.

    Parameters:
        decay: share of the average that is kept at each optimizer step.
        use: "evaluate", "save" or "both", as `ema_use`.
    """

    def __init__(self, decay: float, use: str):
        def average(averaged: Any, current: Any, _: Any) -> None:
            # Lightning's own, and torch's, would round a buffer of integers down to another number.
            if averaged[0].is_floating_point() or averaged[0].is_complex():
                torch._foreach_lerp_(averaged, current, 1 - decay)
            else:
                torch._foreach_copy_(averaged, current)

        super().__init__(multi_avg_fn=torch.no_grad()(average))
        self._uses = ("evaluate", "save") if use == "both" else (use,)
        self._is_exchanged = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Copy the model."""
        super().setup(trainer, pl_module, stage)
        if self._average_model is not None:
            # It is read at each step, and the device would be waited for.
            self._average_model.n_averaged = self._average_model.n_averaged.cpu()

    # A validation of Lightning's is a part of an evaluation, which may be a subclass's own.
    on_validation_epoch_start = pl.Callback.on_validation_epoch_start
    on_validation_epoch_end = pl.Callback.on_validation_epoch_end

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the model have the average, if that is saved."""
        if "save" in self._uses:
            super().on_train_end(trainer, pl_module)

    @contextmanager
    def swap_in_weights_for(self, use: str, pl_module: pl.LightningModule) -> Iterator[None]:
        """Let the model have the weights to "evaluate" or to "save", if it does not have them already."""
        wanted = use in self._uses
        if self._average_model is None or wanted is self._is_exchanged:
            yield
            return
        self._exchange(pl_module)
        try:
            yield
        finally:
            self._exchange(pl_module)

    def _exchange(self, pl_module: pl.LightningModule) -> None:
        self._swap_models(pl_module)
        self._is_exchanged = not self._is_exchanged

    def on_save_checkpoint(self, pl_trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the weights that are not the model's at this moment."""
        super().on_save_checkpoint(pl_trainer, pl_module, checkpoint)
        checkpoint[IS_EXCHANGED] = self._is_exchanged

    def on_load_checkpoint(self, pl_trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Give the model and the average the weights that each had."""
        super().on_load_checkpoint(pl_trainer, pl_module, checkpoint)
        if checkpoint.get(IS_EXCHANGED):
            self._swap_models(pl_module)
