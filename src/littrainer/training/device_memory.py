"""Returning the accelerator's cached memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from littrainer.trainer import Trainer


def empty_device_cache() -> None:
    """Give memory that torch holds and does not use back to the accelerator; without one, do nothing."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
    elif torch.xpu.is_available():
        torch.xpu.empty_cache()


def empty_device_cache_if_due(trainer: Trainer) -> None:
    """Do so between forward and backward pass, every `torch_empty_cache_steps` optimizer steps."""
    steps = trainer.args.torch_empty_cache_steps
    if steps is not None and trainer.state.global_step % steps == 0:
        empty_device_cache()
