"""What a checkpoint says about a module, so that `load_from_checkpoint` can make it anew."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from littrainer.arguments.training_arguments import TrainingArguments
from littrainer.plain_lightning.model_source import description_of
from littrainer.plain_lightning.module_arguments import changed_arguments

if TYPE_CHECKING:
    import lightning.pytorch as pl

# Marks a Lightning checkpoint that a TransformersModule has written.
MARK = "transformers_module"
VERSION = 1


def hyper_parameters_of(model: nn.Module | None, args: TrainingArguments, name: str | None = None) -> dict[str, Any]:
    """The hyperparameters of a module, as plain values that are safe to load; never a token.

    Parameters:
        name: what the model was loaded by.

    Returns:
        `model`, how the model is made anew, or None where only its user knows; `args`, the training arguments that are
        not at their defaults.
    """
    return {"model": description_of(model, name), "args": changed_arguments(args)}


def taken_by(module_class: type, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Those keywords that the constructor of a class takes; a subclass may make model and arguments by itself."""
    parameters = inspect.signature(module_class.__init__).parameters  # type: ignore[misc]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in keywords.items() if takes_any or name in parameters}


def mark_of(trainer: pl.Trainer, hyper_parameters: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint says about the training that wrote it, beside what Lightning says itself.

    Parameters:
        hyper_parameters: as `hyper_parameters_of` has them.
    """
    batches, steps = trainer.num_training_batches, trainer.estimated_stepping_batches
    return {
        "version": VERSION,
        "batches_per_epoch": batches if math.isfinite(batches) else None,
        "max_steps": int(steps) if 0 <= steps < math.inf else None,
        "max_epochs": trainer.max_epochs,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "hyper_parameters": hyper_parameters,
    }
