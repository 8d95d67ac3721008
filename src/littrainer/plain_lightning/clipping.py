"""Clipping the gradients of a module before its optimizer steps."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import nn

from littrainer.optim.stepping import clip_by_norm

BY_VALUE = "value"


def clip_gradients(
    module: pl.LightningModule, optimizer: Any, gradient_clip_val: float | None, algorithm: str | None, default: float
) -> None:
    """Clip as the lightning.Trainer says, and where it says nothing to a 2-norm.

    Lightning itself refuses to clip with a fused optimizer under mixed precision, which is what a Trainer's defaults
    are.

    Parameters:
        gradient_clip_val, algorithm: those of the lightning.Trainer.
        default: the 2-norm, as `max_grad_norm` has it; 0 or below clips nothing.
    """
    bound = default if gradient_clip_val is None else gradient_clip_val
    if bound <= 0:
        return
    scaler = getattr(module.trainer.precision_plugin, "scaler", None)
    # Lightning leaves it to a fused optimizer, which would do so in its step.
    if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
        scaler.unscale_(optimizer)
    if gradient_clip_val is not None and algorithm == BY_VALUE:
        nn.utils.clip_grad_value_(module.parameters(), bound)
        return
    root: Any = module.trainer.strategy.model
    if callable(getattr(root, "clip_grad_norm_", None)):
        # FullyShardedDataParallel, whose parameters are parts of one long vector, sums over the processes.
        root.clip_grad_norm_(bound)
    else:
        clip_by_norm(module.parameters(), bound)
