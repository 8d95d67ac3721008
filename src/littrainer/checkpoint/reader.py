"""Reading the states of trainer, optimizer, schedule and random generators from a checkpoint.

A ValueError says that a file is damaged, could run code, or holds the state of something else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from littrainer.callbacks.state import TrainerState
from littrainer.checkpoint.layout import (
    FSDP_OPTIMIZER_NAME,
    OPTIMIZER_FOLDER,
    OPTIMIZER_NAME,
    RESUME_RECORD_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    holds_parts,
)
from littrainer.checkpoint.random_state import random_state_name, restore_random_states
from littrainer.checkpoint.safe_loading import load_tensors
from littrainer.strategies.shards import is_by_name, numbered_for

logger = logging.getLogger(__name__)

RANDOM_STATES_OF_EACH = "rng_state_*.pth"


def processes_that_wrote(folder: Path) -> int:
    """Number of processes that wrote a checkpoint together; without a record its files of random states tell."""
    record = load_tensors(folder / RESUME_RECORD_NAME) if (folder / RESUME_RECORD_NAME).is_file() else {}
    if "sizes" in record:
        return int(record["sizes"]["world_size"])
    return len(list(folder.glob(RANDOM_STATES_OF_EACH))) or 1


def read_state(folder: Path) -> TrainerState:
    """The trainer state of a checkpoint.

    The best checkpoint is looked for beside this one, since people move and copy the folder of a run; one that no
    longer exists is forgotten.

    Raises:
        ValueError: the file is no trainer state, or counts no steps.
    """
    state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
    if not isinstance(state.global_step, int) or state.global_step < 0:
        raise ValueError(
            f"{folder / TRAINER_STATE_NAME} has global_step={state.global_step!r}, which is no number of optimizer "
            "steps. Resume from another checkpoint."
        )
    if state.best_model_checkpoint is None:
        return state
    recorded = Path(state.best_model_checkpoint)
    beside = folder.parent / recorded.name
    if beside.is_dir() and not (recorded.is_dir() and recorded.samefile(beside)):
        state.best_model_checkpoint = str(beside)
    elif not recorded.is_dir():
        logger.warning("The best checkpoint so far, %s, is gone; it is not loaded.", state.best_model_checkpoint)
        state.best_model_checkpoint = None
    return state


def read_optimizer_state(folder: Path) -> tuple[Path, Any]:
    """The whole state of the optimizer, with numbers or names of parameters, and the path where it was found."""
    path = folder / OPTIMIZER_NAME
    if not path.is_file() and (folder / FSDP_OPTIMIZER_NAME).is_file():
        path = folder / FSDP_OPTIMIZER_NAME
    elif not path.is_file() and holds_parts(folder / OPTIMIZER_FOLDER):
        from littrainer.checkpoint.sharded_files import nested_state, read_whole

        return folder / OPTIMIZER_FOLDER, nested_state(read_whole(folder / OPTIMIZER_FOLDER))
    return path, load_tensors(path)


def load_optimizer(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Load the state of the optimizer."""
    path, state = read_optimizer_state(folder)
    if is_by_name(state):
        state = numbered_for(model, optimizer, state)
    refuse_other_optimizer(path, model, optimizer, state)
    optimizer.load_state_dict(state)


def refuse_other_optimizer(path: Path, model: nn.Module, optimizer: Any, state: Any) -> None:
    """Refuse a state, with the numbers of parameters, that is not one of this training's optimizer.

    Parameters:
        path: where it was read, for the error.

    Raises:
        ValueError: it is that of another optimizer.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    _refuse(path, "optimizer", _optimizer_differences(optimizer, state, names))


def load_schedule(schedule: Any, groups: int, folder: Path) -> None:
    """Load the state of the schedule.

    Parameters:
        groups: the optimizer's parameter groups.
    """
    if getattr(schedule, "is_kept_by_engine", False):
        return
    path = folder / SCHEDULER_NAME
    state = load_tensors(path)
    if not isinstance(state, dict):
        _refuse(path, "schedule", ["it holds no schedule's state"])
    state = fitted_to_groups(state, groups)
    stored, own = state.get("base_lrs"), getattr(schedule, "base_lrs", None)
    if isinstance(stored, list) and isinstance(own, list) and len(stored) != len(own):
        _refuse(path, "schedule", [f"it has {len(stored)} base learning rates and the schedule has {len(own)}"])
    schedule.load_state_dict(state)


def load_scaler(scaler: Any, folder: Path) -> None:
    """Load the state of the loss scaling of fp16, where both the checkpoint and this training have one."""
    path = folder / SCALER_NAME
    if scaler is None or not path.is_file():
        return
    state = load_tensors(path)
    absent = set(scaler.state_dict()).difference(state if isinstance(state, dict) else ())
    _refuse(path, "loss scaling", [f"it lacks {', '.join(sorted(absent))}"] if absent else [])
    scaler.load_state_dict(state)


def load_random_states(folder: Path, args: Any) -> None:
    """Put the random number generators where the checkpoint left them.

    Parameters:
        args: training arguments, which say which of several processes this is.
    """
    name = random_state_name(args)
    if (folder / name).is_file():
        restore_random_states(folder / name)
    elif processes_that_wrote(folder) == args.world_size:
        # Of another number of processes the resume has told.
        logger.warning("%s has no %s. Random numbers go on from the seed.", folder, name)


def _refuse(path: Path, what: str, differences: list[str]) -> None:
    if differences:
        raise ValueError(
            f"{path} does not fit the {what} of this training: {'; '.join(differences[:LONGEST_LIST])}. Set up model "
            "and arguments as they were when the checkpoint was written, or load its model and start a new training."
        )


# Entries of torch's optimizers that have the shape of their parameter.
SHAPED_AS_PARAMETER = frozenset(
    (
        *("acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer"),
        *("prev", "square_avg", "step_size", "sum"),
    )
)
# Entries of torch's schedules with one value for each parameter group.
SCHEDULED_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas")
# Differences in an error.
LONGEST_LIST = 6


def _optimizer_differences(optimizer: Any, state: Any, names: Mapping[int, str]) -> list[str]:
    """What keeps a state from being loaded into an optimizer; empty where it fits.

    Parameters:
        names: the names of parameters, by `id`.
    """
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        # It may keep its state in a form of its own.
        return []
    own = [group["params"] for group in optimizer.param_groups]
    try:
        stored, entries = [group["params"] for group in state["param_groups"]], state["state"]
    except (KeyError, TypeError):
        return ["it holds no optimizer's state"]
    sizes, own_sizes = [*map(len, stored)], [*map(len, own)]
    if sizes != own_sizes:
        return [f"its groups have {sizes} parameters and those of the optimizer have {own_sizes}"]
    if not type(optimizer).__module__.startswith("torch.optim"):
        return []
    return [
        f"{entry} of {names.get(id(parameter), f'parameter {index}')} (parameter group {number}) is "
        f"{tuple(value.shape)} in the checkpoint and the parameter {tuple(parameter.shape)}"
        for number, (indexes, parameters) in enumerate(zip(stored, own, strict=True))
        for index, parameter in zip(indexes, parameters, strict=True)
        for entry, value in entries.get(index, {}).items()
        if entry in SHAPED_AS_PARAMETER and isinstance(value, torch.Tensor) and value.shape != parameter.shape
    ]


def fitted_to_groups(state: dict[str, Any], groups: int) -> dict[str, Any]:
    """A schedule's state for another number of parameter groups, where it is the same for all of them.

    A model that is split between processes has more groups than one that is whole.
    """
    fitted = dict(state)
    for name in SCHEDULED_BY_GROUP:
        values = state.get(name)
        if isinstance(values, list) and values and len(values) != groups and all(one == values[0] for one in values):
            fitted[name] = values[:1] * groups
    return fitted
