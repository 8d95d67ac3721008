"""Sources, descriptions and export of a model."""

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
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

from littrainer.arguments.training_arguments import TrainingArguments
from littrainer.checkpoint.atomic_write import write_folder_atomically
from littrainer.checkpoint.layout import LIGHTNING_STATE_NAME
from littrainer.checkpoint.lightning_format import MODULE_METADATA_KEY, MODULE_METADATA_VERSION
from littrainer.checkpoint.safe_loading import load_tensors
from littrainer.checkpoint.weights import write_weights
from littrainer.distributed.collectives import raise_on_all_ranks
from littrainer.lightning.arguments import get_changed_arguments
from littrainer.lightning.preparation import count_training_steps
from littrainer.model.facts import unwrap_user_model
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.runtime.notes import kind_of
from littrainer.strategies.full_state import get_full_state_dict

ModelSource: TypeAlias = nn.Module | str | os.PathLike[str] | Mapping[str, Any] | Callable[..., nn.Module]

CLASS, CONFIG = "class", "config"
PREFIX = "model."


def resolve_model(source: ModelSource | None, model_class: Any = None) -> nn.Module | None:
    """Return the model of a source; None for a function, which is called later.

    Parameters:
        source: a model; a name or folder for `from_pretrained`; a result of `describe_model`; or a function.
        model_class: the class, or its name, for a name; by default as the configuration says.
    """
    if isinstance(source, nn.Module):
        return source
    if isinstance(source, (str, os.PathLike)):
        return _load_by_name(os.fspath(source), model_class)
    if isinstance(source, Mapping):
        described_class = _find_class(source[CLASS])
        return described_class(described_class.config_class.from_dict(dict(source[CONFIG])))
    if source is None:
        raise ValueError(
            "TransformersModule needs a model: a module, a name or folder for from_pretrained, or a function that "
            "makes it. If load_from_checkpoint cannot make the model of a checkpoint, pass "
            "load_from_checkpoint(path, model=...)."
        )
    if callable(source):
        return None
    raise TypeError(
        f"The model is {kind_of(source)}; give a torch.nn.Module, a name or folder for from_pretrained, or a function "
        "that makes the model."
    )


def call_model_factory(function: Callable[..., Any]) -> nn.Module:
    model = function()
    if not isinstance(model, nn.Module):
        name = getattr(function, "__qualname__", type(function).__name__)
        raise TypeError(f"{name}(), which is to make the model, returned {kind_of(model)} and no torch.nn.Module.")
    return model


def describe_model(model: nn.Module | None) -> dict[str, Any] | None:
    """Return class and configuration of a model of transformers, else None."""
    user_model: Any = None if model is None else unwrap_user_model(model)
    if user_model is None or not is_a(user_model, "pretrained model") or is_a(user_model, "peft model"):
        return None
    # FSDP2 replaces the class by a subclass.
    model_class = type(user_model).__bases__[-1] if is_a(user_model, "resharding module") else type(user_model)
    # The class is the script's.
    if getattr(_import_transformers(), model_class.__name__, None) is not model_class:
        return None
    return {CLASS: model_class.__name__, CONFIG: json.loads(user_model.config.to_json_string())}


def _load_by_name(name: str, model_class: Any) -> nn.Module:
    if model_class is None:
        architectures = getattr(_import_transformers().AutoConfig.from_pretrained(name), "architectures", None)
        if not architectures:
            raise ValueError(
                f"The configuration of {name!r} does not say which class its model has (architectures). Name one, such "
                'as model_class="AutoModelForSequenceClassification".'
            )
        model_class = architectures[0]
    return (_find_class(model_class) if isinstance(model_class, str) else model_class).from_pretrained(name)


def _find_class(name: str) -> Any:
    model_class = getattr(_import_transformers(), name, None)
    if not isinstance(model_class, type):
        raise ValueError(f"transformers has no model class {name!r}. Pass the model itself, or another model_class.")
    return model_class


def _import_transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            "Models are loaded by name with transformers, which is not installed: pip install transformers, or pass "
            "the model itself."
        ) from error


# ---- Checkpoints -----------------------------------------------------------------------------------------------------


def checkpoint_metadata(
    model: nn.Module | None, args: TrainingArguments, pl_trainer: pl.Trainer | None = None
) -> dict[str, Any]:
    """Return metadata in safe values without tokens."""
    hyper_parameters = {"model": describe_model(model), "args": get_changed_arguments(args)}
    if pl_trainer is None:
        return {"version": MODULE_METADATA_VERSION, "hyper_parameters": hyper_parameters}
    batches = pl_trainer.num_training_batches
    # Counting would load the training data.
    steps = math.inf if pl_trainer.train_dataloader is None else count_training_steps(pl_trainer)
    return {
        "version": MODULE_METADATA_VERSION,
        "batches_per_epoch": batches if math.isfinite(batches) else None,
        "max_steps": int(steps) if 0 <= steps < math.inf else None,
        "max_epochs": pl_trainer.max_epochs,
        "accumulate_grad_batches": pl_trainer.accumulate_grad_batches,
        "hyper_parameters": hyper_parameters,
    }


def get_displayed_hyper_parameters(module_class: type, args: TrainingArguments, name: str | None) -> dict[str, Any]:
    model = {} if name is None else {"model": name}
    return filter_init_kwargs(module_class, {**model, "args": get_changed_arguments(args)})


def init_kwargs_in_checkpoint(checkpoint: Any, module_class: type) -> dict[str, Any]:
    if not isinstance(checkpoint, Mapping):
        return {}
    hyper_parameters = checkpoint.get(pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY) or {}
    metadata = (checkpoint.get(MODULE_METADATA_KEY) or {}).get("hyper_parameters") or {}
    # Before a name, which may be a folder that is gone.
    described = {name: value for name, value in metadata.items() if value is not None}
    return filter_init_kwargs(module_class, {**hyper_parameters, **described})


def filter_init_kwargs(module_class: type, keywords: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(module_class.__init__).parameters  # type: ignore[misc]
    has_var_keywords = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in keywords.items() if has_var_keywords or name in parameters}


def read_init_kwargs(path: Any, module_class: type) -> dict[str, Any]:
    """Return a module's keywords; from a file only the model."""
    if not isinstance(path, (str, os.PathLike)):
        return {}
    folder = Path(path)
    if folder.is_dir():
        state = folder / LIGHTNING_STATE_NAME
        return init_kwargs_in_checkpoint(load_tensors(state), module_class) if state.is_file() else {}
    if folder.is_file():
        # Lightning raises the errors of unreadable files.
        with contextlib.suppress(pickle.UnpicklingError, RuntimeError):
            # `mmap` skips the weights.
            checkpoint = torch.load(folder, map_location="cpu", weights_only=True, mmap=True)
            init_kwargs = init_kwargs_in_checkpoint(checkpoint, module_class)
            return {"model": init_kwargs["model"]} if "model" in init_kwargs else {}
    return {}


# ---- Folders ---------------------------------------------------------------------------------------------------------


def export_model(
    model: nn.Module | None,
    processing_class: Any,
    folder: Path,
    max_shard_size: int | str | None,
    strategy: Any,
    rank: int,
) -> None:
    """Write model and processing class on rank 0, in a collective call."""
    if model is None:
        raise ValueError("export_pretrained() has no model to write: it is made in configure_model(), by Trainer.fit.")
    parameters = list(model.parameters())
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        raise ValueError(
            "export_pretrained() cannot gather the weights that DeepSpeed has sharded. Save a checkpoint, and "
            "consolidate it with "
            "lightning.pytorch.utilities.deepspeed.convert_zero_checkpoint_to_fp32_state_dict."
        )
    # None for replicated weights.
    weights: dict[str, Any] | None = None
    if isinstance(strategy, FSDPStrategy):
        state = strategy.lightning_module_state_dict()
        weights = {name.removeprefix(PREFIX): value for name, value in state.items() if name.startswith(PREFIX)}
    elif any(is_a(parameter, "sharded tensor") for parameter in parameters):
        weights = get_full_state_dict(model)
    with raise_on_all_ranks(f"writing {folder}"):
        if rank == 0:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with write_folder_atomically(folder) as temporary:
                write_weights(model, temporary, weights, max_shard_size)
                if processing_class is not None:
                    processing_class.save_pretrained(temporary)
