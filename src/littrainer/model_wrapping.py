"""The Trainer's model as steps call it: its forward in mixed precision, compiled where the arguments ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from littrainer.compilation import compile_keywords, is_compiled
from littrainer.mixed_precision import forward_type, run_forward_in

if TYPE_CHECKING:
    from littrainer.trainer import Trainer


def wrapped_model(trainer: Trainer) -> nn.Module:
    """Prepare the model on its device, and return what steps call.

    `trainer.model` stays the user's module, so that what is saved has its names. What wrapped it once is kept: a second
    training compiles nothing anew.
    """
    model = trainer.model
    dtype = forward_type(trainer.args)
    if dtype is not None:
        run_forward_in(model, trainer.args.device.type, dtype)
    if trainer.model_wrapped is not model and trainer.accelerator.unwrap_model(trainer.model_wrapped) is model:
        return trainer.model_wrapped
    keywords = compile_keywords(trainer.args)
    if keywords is None or is_compiled(model):
        return model
    compiled: Any = torch.compile(model, **keywords)
    return compiled
