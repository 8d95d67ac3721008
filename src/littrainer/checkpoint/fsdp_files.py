"""Weights and optimizer states as transformers leaves them in checkpoints of FSDP, in one file or in parts.

In one file the optimizer's state has names of parameters; in parts, a folder of `torch.distributed.checkpoint` holds
what each process has.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from littrainer.checkpoint.layout import OPTIMIZER_NAME
from littrainer.checkpoint.safe_loading import load_tensors

FSDP_WEIGHTS_NAME = "pytorch_model_fsdp.bin"
FSDP_OPTIMIZER_NAME = "optimizer.bin"
WEIGHTS_FOLDER = "pytorch_model_fsdp_0"
OPTIMIZER_FOLDER = "optimizer_0"
# What the folders hold everything under.
WEIGHTS_KEY, OPTIMIZER_KEY = "model", "optimizer"
STATE, GROUPS = f"{OPTIMIZER_KEY}.state.", f"{OPTIMIZER_KEY}.param_groups."


def holds_fsdp_weights(folder: Path) -> bool:
    """Whether a checkpoint has weights in either of these forms."""
    return (folder / FSDP_WEIGHTS_NAME).is_file() or holds_parts(folder / WEIGHTS_FOLDER)


def holds_parts(folder: Path) -> bool:
    """Whether there is a folder in which each process has written its part."""
    from littrainer.checkpoint.distributed_folders import is_distributed_folder

    return is_distributed_folder(folder)


def read_fsdp_weights(folder: Path) -> dict[str, Any]:
    """The weights of a checkpoint, whole.

    Raises:
        ValueError: a file is damaged, or could run code.
    """
    if (folder / FSDP_WEIGHTS_NAME).is_file():
        return load_tensors(folder / FSDP_WEIGHTS_NAME)
    from littrainer.checkpoint.distributed_folders import read_whole

    whole = read_whole(folder / WEIGHTS_FOLDER)
    return {name.removeprefix(f"{WEIGHTS_KEY}."): value for name, value in whole.items()}


def read_optimizer_state(folder: Path) -> tuple[Path, Any]:
    """The state of the optimizer in a checkpoint, whole, with numbers or names of parameters, and where it was found.

    Raises:
        ValueError: a file is damaged, or could run code.
    """
    if (folder / OPTIMIZER_NAME).is_file() or not (
        (folder / FSDP_OPTIMIZER_NAME).is_file() or holds_parts(folder / OPTIMIZER_FOLDER)
    ):
        return folder / OPTIMIZER_NAME, load_tensors(folder / OPTIMIZER_NAME)
    if (folder / FSDP_OPTIMIZER_NAME).is_file():
        return folder / FSDP_OPTIMIZER_NAME, load_tensors(folder / FSDP_OPTIMIZER_NAME)
    from littrainer.checkpoint.distributed_folders import read_whole

    return folder / OPTIMIZER_FOLDER, nested_state(read_whole(folder / OPTIMIZER_FOLDER))


def nested_state(flat: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state with names of parameters, from what a folder holds by name."""
    groups: dict[int, dict[str, Any]] = {}
    for name, value in flat.items():
        if name.startswith(GROUPS):
            number, _, entry = name.removeprefix(GROUPS).partition(".")
            groups.setdefault(int(number), {})[entry] = value
    param_groups = [groups[number] for number in sorted(groups)]
    state: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        if name.startswith(STATE):
            # Names of parameters have dots, those of entries have not.
            parameter, _, entry = name.removeprefix(STATE).rpartition(".")
            state.setdefault(parameter, {})[entry] = value
    return {"state": state, "param_groups": param_groups}


def read_weights_into(folder: Path, own: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Read this process's part of weights from a folder into the model's own tensors.

    Parameters:
        own: the model's state dict.

    Returns:
        names that the folder lacks, and names that the model lacks.

    Raises:
        ValueError: the folder is damaged or could run code, or a shape differs.
    """
    from littrainer.checkpoint.distributed_folders import read_into, stored_tensors

    stored = {name.removeprefix(f"{WEIGHTS_KEY}."): entry for name, entry in stored_tensors(folder).items()}
    for name, value in own.items():
        entry = stored.get(name)
        if entry is not None and entry.size != value.shape:
            raise RuntimeError(
                f"The weights in {folder} are not those of this model: {name} is {tuple(entry.size)} in the "
                f"checkpoint and {tuple(value.shape)} in the model. Make the model as it was when the checkpoint was "
                "written."
            )
    wanted = {f"{WEIGHTS_KEY}.{name}": value for name, value in own.items() if name in stored}
    read_into(folder, wanted)
    return [name for name in own if name not in stored], [name for name in stored if name not in own]


def read_optimizer_into(folder: Path, parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Read this process's part of an optimizer's state.

    Parameters:
        parameters: by name; entries of the same shape are spread as they are.

    Returns:
        the state with names of parameters.

    Raises:
        ValueError: the folder is damaged, or could run code.
    """
    from littrainer.checkpoint.distributed_folders import read_into, stored_tensors

    wanted: dict[str, Any] = {}
    for name, entry in stored_tensors(folder).items():
        if entry is None:
            wanted[name] = None
            continue
        parameter = parameters.get(name.removeprefix(STATE).rpartition(".")[0])
        is_spread = parameter is not None and parameter.dim() > 0 and parameter.shape == entry.size
        wanted[name] = (
            torch.empty_like(parameter, dtype=entry.properties.dtype)  # type: ignore[arg-type]
            if is_spread
            else torch.empty(entry.size, dtype=entry.properties.dtype)
        )
    read_into(folder, wanted)
    return nested_state(wanted)
