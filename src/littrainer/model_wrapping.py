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
    """Prepare the model on its device, and return what training steps call.

    `trainer.model` stays the user's module, so that what is saved has its names. What wrapped it once is kept: a second
    training compiles nothing anew.
    """
    model = trainer.model
    wrapped_before = any(part is model for part in trainer.model_wrapped.modules())
    wrapped = trainer._wrap_model(trainer.model_wrapped if wrapped_before else model)
    # What a subclass puts around the model is called as it is; so it is in transformers.
    return prepared_model(trainer, wrapped) if wrapped is model or is_compiled(wrapped) else wrapped


def prepared_model(trainer: Trainer, wrapped: nn.Module | None = None) -> nn.Module:
    """Let the model's forward run in mixed precision, and return it, compiled where the arguments ask for it.

    Parameters:
        wrapped: the model, or what an earlier training compiled it to.
    """
    model = trainer.model
    dtype = forward_type(trainer.args)
    if dtype is not None:
        run_forward_in(model, trainer.args.device.type, dtype)
    if wrapped is not None and wrapped is not model:
        return wrapped
    keywords = compile_keywords(trainer.args)
    if keywords is None or is_compiled(model):
        return model
    compiled: Any = torch.compile(model, **keywords)
    return compiled
