"""What a checkpoint says about a module, so that `load_from_checkpoint` can make it anew."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from littrainer.arguments.training_arguments import TrainingArguments
from littrainer.lightning.model_source import description_of
from littrainer.lightning.module_arguments import changed_arguments

if TYPE_CHECKING:
    import lightning.pytorch as pl

# Marks a Lightning checkpoint that a TransformersModule has written.
MARK = "transformers_module"
VERSION = 1


def hyper_parameters_of(model: nn.Module | None, args: TrainingArguments, name: str | None = None) -> dict[str, Any]:
    """What makes a module anew, as plain values that are safe to load; never a token.

    Parameters:
        name: what the model was loaded by.

    Returns:
        `model`, how the model is made anew, or None where only its user knows; `args`, the training arguments that are
        not at their defaults.
    """
    return {"model": description_of(model, name), "args": changed_arguments(args)}


def shown_hyper_parameters(module_class: type, args: TrainingArguments, name: str | None) -> dict[str, Any]:
    """The hyperparameters that loggers show and LightningCLI takes for options of the class.

    Parameters:
        name: what the model was loaded by; one that was handed over as an object has no name.
    """
    return taken_by(module_class, {**({} if name is None else {"model": name}), "args": changed_arguments(args)})


def kept_in(checkpoint: Any, module_class: type) -> dict[str, Any]:
    """The keywords of a module that a checkpoint keeps, as far as the class takes them.

    Parameters:
        checkpoint: what a checkpoint holds.
    """
    if not isinstance(checkpoint, Mapping):
        return {}
    from lightning.pytorch import LightningModule

    own = checkpoint.get(LightningModule.CHECKPOINT_HYPER_PARAMS_KEY) or {}
    marked = (checkpoint.get(MARK) or {}).get("hyper_parameters") or {}
    # The description of a model needs nothing but the checkpoint, and comes before a name.
    known = {name: value for name, value in marked.items() if value is not None}
    return taken_by(module_class, {**own, **known})


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
    batches = trainer.num_training_batches
    # One that has only evaluated would load training data to tell.
    steps = math.inf if trainer.train_dataloader is None else steps_of_training(trainer)
    return {
        "version": VERSION,
        "batches_per_epoch": batches if math.isfinite(batches) else None,
        "max_steps": int(steps) if 0 <= steps < math.inf else None,
        "max_epochs": trainer.max_epochs,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "hyper_parameters": hyper_parameters,
    }


def steps_of_training(trainer: pl.Trainer) -> float:
    """Optimizer steps of a training, also if their size changes from epoch to epoch, which Lightning leaves out."""
    # A Trainer imports this file, and Lightning only when it is made.
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    steps, epochs, batches = trainer.estimated_stepping_batches, trainer.max_epochs or 0, trainer.num_training_batches
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    schedule = next((one for one in callbacks if isinstance(one, GradientAccumulationScheduler)), None)
    if schedule is None or epochs < 1 or batches == math.inf:
        return steps
    steps = sum(math.ceil(batches / schedule.get_accumulate_grad_batches(epoch)) for epoch in range(epochs))
    return steps if trainer.max_steps < 0 else min(steps, trainer.max_steps)
