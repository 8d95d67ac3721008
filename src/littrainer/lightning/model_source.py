"""Where the model of a module comes from, what a checkpoint says about that, and the folders that hold it."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import math
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

from littrainer.arguments.training_arguments import TrainingArguments
from littrainer.checkpoint.atomic_write import staged_folder
from littrainer.checkpoint.layout import LIGHTNING_STATE_NAME
from littrainer.checkpoint.lightning_format import MARK, MARK_VERSION
from littrainer.checkpoint.lightning_io import TransformersCheckpointIO
from littrainer.checkpoint.safe_loading import load_tensors
from littrainer.checkpoint.weights import write_weights
from littrainer.distributed.agreement import failing_together
from littrainer.errors.lazy_isinstance import is_a
from littrainer.errors.notes import kind_of
from littrainer.lightning.arguments import changed_arguments
from littrainer.model.facts import users_model
from littrainer.strategies.shards import whole_state_dict

Module = TypeVar("Module", bound=pl.LightningModule)
# What a module can be given for its model.
ModelSource: TypeAlias = nn.Module | str | os.PathLike[str] | Mapping[str, Any] | Callable[..., nn.Module]

# Keys of a description: the class, its configuration as a dict, and the name that the model was loaded by.
CLASS, CONFIG, NAME = "class", "config", "name"
# Begins the names of the model's weights in a module.
PREFIX = "model."


def made_at_once(source: ModelSource | None, model_class: Any = None) -> nn.Module | None:
    """The model that a source stands for; None if the source is a function, which is called later.

    Parameters:
        source: the model; a name or folder for `from_pretrained`; a description, as `description_of` gives it; or a
            function that makes it.
        model_class: the class of a model that is loaded by name, or its name in transformers; by default the one that
            the configuration says.

    Raises:
        TypeError: it is none of these.
        ValueError: there is no source, or it does not say which class the model has.
        ImportError: transformers, which loads models by name, is not installed.
    """
    if isinstance(source, nn.Module):
        return source
    if isinstance(source, (str, os.PathLike)):
        return _loaded(os.fspath(source), model_class)
    if isinstance(source, Mapping):
        described = _class_named(source[CLASS])
        return described(described.config_class.from_dict(dict(source[CONFIG])))
    if source is None:
        raise ValueError(
            "TransformersModule needs a model: a module, a name or folder for from_pretrained, or a function that "
            "makes it. For one of load_from_checkpoint, whose checkpoint does not say how its model is made, pass "
            "load_from_checkpoint(path, model=...)."
        )
    if callable(source):
        return None
    raise TypeError(
        f"The model is {kind_of(source)}; give a torch.nn.Module, a name or folder for from_pretrained, or a function "
        "that makes the model."
    )


def made_by(function: Callable[..., Any]) -> nn.Module:
    """The model that a function makes.

    Raises:
        TypeError: it makes something else.
    """
    model = function()
    if not isinstance(model, nn.Module):
        name = getattr(function, "__qualname__", type(function).__name__)
        raise TypeError(f"{name}(), which is to make the model, returned {kind_of(model)} and no torch.nn.Module.")
    return model


def description_of(model: nn.Module | None, name: str | None = None) -> dict[str, Any] | None:
    """Describe how a model is made, in plain values; None if only its user knows.

    Parameters:
        name: what it was loaded by.
    """
    model = None if model is None else users_model(model)
    if model is None or not is_a(model, "pretrained model") or is_a(model, "peft model"):
        return None
    known: Any = model
    # FSDP2 gives a model another class, made of its mark and the model's.
    model_class = type(model).__bases__[-1] if is_a(model, "resharding module") else type(model)
    # A class that transformers does not have is its script's.
    if getattr(_transformers(), model_class.__name__, None) is not model_class:
        return None
    config = json.loads(known.config.to_json_string())
    return {CLASS: model_class.__name__, CONFIG: config, **({NAME: name} if name else {})}


def _loaded(name: str, model_class: Any) -> nn.Module:
    transformers = _transformers()
    if isinstance(model_class, str):
        model_class = _class_named(model_class)
    if model_class is None:
        config = transformers.AutoConfig.from_pretrained(name)
        architectures = getattr(config, "architectures", None) or []
        if not architectures:
            raise ValueError(
                f"The configuration of {name!r} does not say which class its model has (architectures). Name one, such "
                'as model_class="AutoModelForSequenceClassification".'
            )
        model_class = _class_named(architectures[0])
    return model_class.from_pretrained(name)


def _class_named(name: str) -> Any:
    found = getattr(_transformers(), name, None)
    if not isinstance(found, type):
        raise ValueError(f"transformers has no model class {name!r}. Pass the model itself, or another model_class.")
    return found


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            "Models are loaded by name with transformers, which is not installed: pip install transformers, or pass "
            "the model itself."
        ) from error


# ---- What a checkpoint says ------------------------------------------------------------------------------------------


def hyper_parameters_of(model: nn.Module | None, args: TrainingArguments, name: str | None = None) -> dict[str, Any]:
    """Return what makes the same module again, as plain values that are safe to load; never a token.

    Parameters:
        name: what the model was loaded by.

    Returns:
        `model`, how the model is made, or None if only its user knows; `args`, the training arguments that are
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
    """The keywords of a module that a checkpoint keeps, as far as the class takes them."""
    if not isinstance(checkpoint, Mapping):
        return {}
    own = checkpoint.get(pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY) or {}
    marked = (checkpoint.get(MARK) or {}).get("hyper_parameters") or {}
    # The description of a model needs nothing but the checkpoint, and comes before a name.
    known = {name: value for name, value in marked.items() if value is not None}
    return taken_by(module_class, {**own, **known})


def taken_by(module_class: type, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Those keywords that the constructor of a class takes; a subclass may make model and arguments by itself."""
    parameters = inspect.signature(module_class.__init__).parameters  # type: ignore[misc]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in keywords.items() if takes_any or name in parameters}


def mark_of(pl_trainer: pl.Trainer, hyper_parameters: dict[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint says about the training that wrote it, in addition to what Lightning says."""
    batches = pl_trainer.num_training_batches
    # One that has only evaluated would load training data to find out.
    steps = math.inf if pl_trainer.train_dataloader is None else steps_of_training(pl_trainer)
    return {
        "version": MARK_VERSION,
        "batches_per_epoch": batches if math.isfinite(batches) else None,
        "max_steps": int(steps) if 0 <= steps < math.inf else None,
        "max_epochs": pl_trainer.max_epochs,
        "accumulate_grad_batches": pl_trainer.accumulate_grad_batches,
        "hyper_parameters": hyper_parameters,
    }


def steps_of_training(pl_trainer: pl.Trainer) -> float:
    """Optimizer steps of a training, also if their size changes from epoch to epoch, which Lightning leaves out."""
    steps, epochs = pl_trainer.estimated_stepping_batches, pl_trainer.max_epochs or 0
    batches = pl_trainer.num_training_batches
    callbacks: list[Any] = pl_trainer.callbacks  # type: ignore[attr-defined]
    schedule = next((one for one in callbacks if isinstance(one, GradientAccumulationScheduler)), None)
    if schedule is None or epochs < 1 or batches == math.inf:
        return steps
    steps = sum(math.ceil(batches / schedule.get_accumulate_grad_batches(epoch)) for epoch in range(epochs))
    return steps if pl_trainer.max_steps < 0 else min(steps, pl_trainer.max_steps)


# ---- Folders ---------------------------------------------------------------------------------------------------------


def export_model(module: Any, folder: Path, max_shard_size: int | str | None) -> None:
    """Write the model, and the processing class if there is one; the folder appears complete or not at all.

    All processes call this; the first one writes.

    Raises:
        ValueError: the model is not made yet, or its weights are out of reach.
        OSError: the folder cannot be written.
    """
    if module.model is None:
        raise ValueError("export_pretrained() has no model to write: it is made in configure_model(), by Trainer.fit.")
    weights = _whole_weights(module)
    with failing_together(f"writing {folder}"):
        if module.rank == 0:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with staged_folder(folder) as staged:
                write_weights(module.model, staged, weights, max_shard_size)
                if module.processing_class is not None:
                    module.processing_class.save_pretrained(staged)


def _whole_weights(module: Any) -> dict[str, Any] | None:
    # In the first process; None if each process has them all.
    parameters = list(module.model.parameters())
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        raise ValueError(
            "export_pretrained() cannot gather the weights that DeepSpeed has spread over the processes. Save a "
            "checkpoint, and put it together with "
            "lightning.pytorch.utilities.deepspeed.convert_zero_checkpoint_to_fp32_state_dict."
        )
    strategy = getattr(module.attached_trainer(), "strategy", None)
    if isinstance(strategy, FSDPStrategy):
        state = strategy.lightning_module_state_dict()
        return {name.removeprefix(PREFIX): value for name, value in state.items() if name.startswith(PREFIX)}
    if any(is_a(parameter, "sharded tensor") for parameter in parameters):
        return whole_state_dict(module.model)
    return None


def module_from_folder(
    module_class: type[Module], folder: Path, strict: bool | None, given: Mapping[str, Any]
) -> Module:
    """A module with the model of a folder that `TransformersCheckpointIO`, a Trainer or `save_pretrained` wrote.

    Parameters:
        strict: as in `load_from_checkpoint`.
        given: keywords of the module, which come before what the folder says.

    Raises:
        ValueError: the folder is damaged, or does not say how its model is made.
    """
    file = folder / LIGHTNING_STATE_NAME
    keywords = {**(kept_in(load_tensors(file), module_class) if file.is_file() else {}), **given}
    if keywords.get("model") is None and (folder / "config.json").is_file():
        keywords["model"] = made_at_once(str(folder), keywords.get("model_class"))
    module: Any = module_class(**keywords)
    if module.model is None:
        module.configure_model()
    checkpoint = TransformersCheckpointIO(module.model).load_checkpoint(folder)
    module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading if strict is None else strict)
    return module


def model_kept_in(module_class: type[Any], file: Any) -> dict[str, Any]:
    """The description of the model in a checkpoint of Lightning, as a keyword of the module; empty if there is none.

    Parameters:
        file: a path; of anything else, such as a URL, nothing is said.
    """
    if not isinstance(file, (str, os.PathLike)) or not Path(file).is_file():
        return {}
    # What cannot be read so Lightning will read, or refuse, next.
    with contextlib.suppress(pickle.UnpicklingError, RuntimeError):
        # Mapped, so that the weights are not read here.
        checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return {name: value for name, value in kept_in(checkpoint, module_class).items() if name == "model"}
    return {}
