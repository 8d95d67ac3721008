"""The callback of `ema_decay` and `ema_use`."""

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
    """A callback that averages weights and buffers exponentially, for evaluations and checkpoints.

    A checkpoint has the weights to save (averaged or trained) in the model's file, the others in the resume record.

    Parameters:
        decay: weight of the old average.
        use: "evaluate", "save" or "both".
    """

    def __init__(self, decay: float, use: str):
        def average(averaged: Any, current: Any, _: Any) -> None:
            # Lightning's and torch's functions would round integer buffers down.
            if averaged[0].is_floating_point() or averaged[0].is_complex():
                torch._foreach_lerp_(averaged, current, 1 - decay)
            else:
                torch._foreach_copy_(averaged, current)

        super().__init__(multi_avg_fn=torch.no_grad()(average))
        self._uses = ("evaluate", "save") if use == "both" else (use,)
        self._is_exchanged = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self._average_model is not None:
            # Kept on the host: Lightning reads it at each step, which would synchronize the device.
            self._average_model.n_averaged = self._average_model.n_averaged.cpu()

    # Disabled, since `swap_in_weights_for` swaps around the Trainer's evaluations.
    on_validation_epoch_start = pl.Callback.on_validation_epoch_start
    on_validation_epoch_end = pl.Callback.on_validation_epoch_end

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if "save" in self._uses:
            super().on_train_end(trainer, pl_module)

    @contextmanager
    def swap_in_weights_for(self, purpose: str, pl_module: pl.LightningModule) -> Iterator[None]:
        uses_average = purpose in self._uses
        if self._average_model is None or uses_average is self._is_exchanged:
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
        super().on_save_checkpoint(pl_trainer, pl_module, checkpoint)
        checkpoint[IS_EXCHANGED] = self._is_exchanged

    def on_load_checkpoint(self, pl_trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(pl_trainer, pl_module, checkpoint)
        if checkpoint.get(IS_EXCHANGED):
            self._swap_models(pl_module)
