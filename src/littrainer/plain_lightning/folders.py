"""A module's model as a folder for `from_pretrained`, and modules made from such folders."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning.pytorch.strategies import FSDPStrategy

from littrainer.checkpoint.lightning_io import TransformersCheckpointIO
from littrainer.checkpoint.names import LIGHTNING_STATE_NAME
from littrainer.checkpoint.safe_loading import load_tensors
from littrainer.checkpoint.shards import whole_state_dict
from littrainer.checkpoint.staging import staged_folder
from littrainer.checkpoint.weights import write_weights
from littrainer.distributed.agreement import failing_together
from littrainer.ecosystem import is_a
from littrainer.plain_lightning.hyper_parameters import kept_in
from littrainer.plain_lightning.model_source import made_at_once

if TYPE_CHECKING:
    from littrainer.plain_lightning.module import TransformersModule

Module = TypeVar("Module", bound="TransformersModule")

CONFIG_NAME = "config.json"


def export_model(module: TransformersModule, folder: Path, max_shard_size: int | str | None) -> None:
    """Write the model, and the processing class where there is one; the folder appears complete or not at all.

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


def _whole_weights(module: TransformersModule) -> dict[str, Any] | None:
    """The weights of a model of which each process holds a part, in the first process; None where each has them all."""
    parameters = list(module.model.parameters())
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        raise ValueError(
            "export_pretrained() cannot gather the weights that DeepSpeed has spread over the processes. Save a "
            "checkpoint, and put it together with "
            "lightning.pytorch.utilities.deepspeed.convert_zero_checkpoint_to_fp32_state_dict."
        )
    strategy = getattr(module.attached_trainer(), "strategy", None)
    if isinstance(strategy, FSDPStrategy):
        prefix = "model."
        state = strategy.lightning_module_state_dict()
        return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
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
    if keywords.get("model") is None and (folder / CONFIG_NAME).is_file():
        keywords["model"] = made_at_once(str(folder), keywords.get("model_class"))
    module = module_class(**keywords)
    if module.model is None:
        module.configure_model()
    checkpoint = TransformersCheckpointIO(module.model).load_checkpoint(folder)
    module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading if strict is None else strict)
    return module


def model_kept_in(module_class: type[Any], file: Any) -> dict[str, Any]:
    """The description of the model in a checkpoint of Lightning, as a keyword of the module; empty where there is none.

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
