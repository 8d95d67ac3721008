"""Adapters of PEFT: only they are in a checkpoint, and only they are read back."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from littrainer.checkpoint.safe_loading import load_safetensors, load_tensors
from littrainer.ecosystem import is_a

logger = logging.getLogger(__name__)

ADAPTER_WEIGHTS_NAMES = ("adapter_model.safetensors", "adapter_model.bin")
# Parameters that are trained and that PEFT leaves out of an adapter's file: the encoder of p-tuning, of which it keeps
# what it computes only, and parameters of the base model that a script has unfrozen by hand.
LEFT_OUT_NAME = "littrainer_trained_beside_adapters.pt"
# Names in a warning; the rest is counted.
LONGEST_LIST = 8
# The name that PEFT gives an adapter by itself; it lies in the checkpoint's own folder, others in one of their names.
DEFAULT_ADAPTER = "default"
# What PEFT's own models have before each name; a transformers model that carries adapters is written with it too.
PEFT_PREFIX = "base_model.model."


def carries_adapters(model: Any) -> bool:
    """Whether saving this model saves adapters only."""
    return is_a(model, "peft model") or bool(getattr(model, "_hf_peft_config_loaded", False))


def adapter_folders(folder: Path) -> dict[str, Path]:
    """The folders below a checkpoint that hold adapters, by adapter name; the checkpoint's own under `""`."""
    found = {"": folder} if _weights_file(folder) is not None else {}
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and _weights_file(entry) is not None:
            found[entry.name] = entry
    return found


def load_adapters(model: Any, folder: Path, *, is_trainable: bool) -> list[str]:
    """Load the adapters of a checkpoint into a model that has them.

    Parameters:
        is_trainable: whether the adapter at work is to be trained; else the model is put into evaluation mode.

    Returns:
        what did not match, one sentence for each adapter.

    Raises:
        ValueError: there is no adapter in the folder, or one that the model does not have.
    """
    folders = adapter_folders(folder)
    if not folders:
        raise ValueError(
            f"No adapter in {folder}: expected {' or '.join(ADAPTER_WEIGHTS_NAMES)}. Give a folder that "
            "save_pretrained or a Trainer wrote of this model."
        )
    if not is_a(model, "peft model"):
        return _load_carried_adapter(model, folders.get("", folder))
    active = model.active_adapters[0]
    complaints = []
    # A single adapter in the checkpoint's own folder is the one at work, whatever its name here.
    named = {(active if list(folders) == [""] else name or DEFAULT_ADAPTER): path for name, path in folders.items()}
    for name, path in named.items():
        if name not in model.peft_config:
            raise ValueError(
                f"{path} holds an adapter named {name!r}, and the model has {', '.join(map(repr, model.peft_config))}. "
                "Add the adapter to the model before training goes on."
            )
        complaints += [f"adapter {name!r}: {text}" for text in _differences(model, name, read_adapter(path))]
    absent = [name for name in model.active_adapters if name not in named]
    complaints += [f"adapter {name!r}: not in the checkpoint" for name in absent]
    if complaints:
        return complaints
    for name, path in named.items():
        model.load_adapter(str(path), name, is_trainable=is_trainable and name == active)
    if len(model.peft_config) > 1 and hasattr(model, "set_adapter"):
        model.set_adapter(active)
    return []


def read_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of an adapter, under the names of the file.

    Raises:
        ValueError: there is no adapter in the folder, or it is damaged.
    """
    path = _weights_file(folder)
    if path is None:
        raise ValueError(
            f"No adapter in {folder}: expected {' or '.join(ADAPTER_WEIGHTS_NAMES)}. Give a folder that "
            "save_pretrained or a Trainer wrote of this model."
        )
    return load_safetensors(path) if path.suffix == ".safetensors" else load_tensors(path)


def write_left_out(model: Any, folder: Path, state_dict: Mapping[str, Any] | None = None) -> None:
    """Write the trained parameters that the files of the adapters lack; no file where they lack none.

    Parameters:
        state_dict: values to write in the place of the model's own.
    """
    own = model.state_dict()
    values = {name: (own if state_dict is None else state_dict).get(name, own[name]) for name in _left_out(model, own)}
    if values:
        torch.save(values, folder / LEFT_OUT_NAME)
    else:
        (folder / LEFT_OUT_NAME).unlink(missing_ok=True)


def load_left_out(model: Any, folder: Path) -> list[str]:
    """Load what `write_left_out` wrote, and log which trained parameters are in no file at all.

    Returns:
        what did not match; nothing is loaded then.
    """
    own = model.state_dict()
    path = folder / LEFT_OUT_NAME
    stored = load_tensors(path) if path.is_file() else {}
    wrong = [name for name, value in stored.items() if name not in own or own[name].shape != value.shape]
    if wrong:
        return [f"{name} in {LEFT_OUT_NAME} is not the model's" for name in wrong]
    absent = [name for name in _left_out(model, own) if name not in stored]
    if absent:
        logger.warning(
            "%s does not hold %s%s, which is trained: PEFT does not save it. It stays as it is, and numbers differ "
            "from those of an uninterrupted training.",
            folder,
            ", ".join(absent[:LONGEST_LIST]),
            f" and {len(absent) - LONGEST_LIST} more" if len(absent) > LONGEST_LIST else "",
        )
    model.load_state_dict(stored, strict=False)
    return []


def _left_out(model: Any, own: Mapping[str, Any]) -> list[str]:
    from peft import get_peft_model_state_dict

    names = list(model.peft_config) if is_a(model, "peft model") else model.active_adapters()
    kept = {
        tensor.data_ptr()
        for name in names
        for tensor in get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False).values()
    }
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [name for name in trained if name in own and own[name].numel() and own[name].data_ptr() not in kept]


def _weights_file(folder: Path) -> Path | None:
    return next((folder / name for name in ADAPTER_WEIGHTS_NAMES if (folder / name).is_file()), None)


def _differences(model: Any, name: str, stored: dict[str, torch.Tensor]) -> list[str]:
    from peft import get_peft_model_state_dict

    # Embeddings are stored beside an adapter where their size was changed; whether they are is PEFT's to say.
    own = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    missing = [key for key in own if key not in stored]
    unexpected = [key for key in stored if key not in own and "embed" not in key and "lm_head" not in key]
    shapes = [
        f"{key} has shape {tuple(stored[key].shape)}, the model's {tuple(tensor.shape)}"
        for key, tensor in own.items()
        if key in stored and stored[key].shape != tensor.shape
    ]
    return (
        [f"no weights for {key}" for key in missing]
        + [f"weights for {key}, which the model does not have" for key in unexpected]
        + shapes
    )


def _load_carried_adapter(model: Any, folder: Path) -> list[str]:
    from peft import set_peft_model_state_dict

    active = model.active_adapters()[0]
    stored = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in read_adapter(folder).items()}
    complaints = _differences(model, active, stored)
    if not complaints:
        set_peft_model_state_dict(model, stored, adapter_name=active)
    return complaints
