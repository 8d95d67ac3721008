"""Reading the states of trainer, optimizer, schedule and random generators from a checkpoint.

A ValueError says that a file is damaged, could run code, or holds the state of something else.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from littrainer.callbacks.state import TrainerState
from littrainer.checkpoint.layout import (
    FSDP_OPTIMIZER_NAME,
    OPTIMIZER_FOLDER,
    OPTIMIZER_NAME,
    RANDOM_STATE_NAME,
    RESUME_RECORD_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    has_sharded_state,
    random_state_name,
    rank_file,
)
from littrainer.checkpoint.safe_loading import load_tensors
from littrainer.data.resume.rng import set_rng_states
from littrainer.strategies.full_state import convert_to_param_ids, is_keyed_by_name

logger = logging.getLogger(__name__)


def read_world_size(folder: Path) -> int:
    """Return how many processes wrote a checkpoint together; without a record its files of random states tell."""
    record = load_tensors(folder / RESUME_RECORD_NAME) if (folder / RESUME_RECORD_NAME).is_file() else {}
    if "sizes" in record:
        return int(record["sizes"]["world_size"])
    return len(list(folder.glob(rank_file("*")))) or 1


def read_state(folder: Path) -> TrainerState:
    """Return the trainer state of a checkpoint; a ValueError if the file is none.

    The best checkpoint is looked for next to this one, since people move and copy the folder of a run; a best one that
    no longer exists is forgotten.
    """
    state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
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
    """Return the whole state of the optimizer, with numbers or names of parameters, and the path where it was found."""
    path = folder / OPTIMIZER_NAME
    if not path.is_file() and (folder / FSDP_OPTIMIZER_NAME).is_file():
        path = folder / FSDP_OPTIMIZER_NAME
    elif not path.is_file() and has_sharded_state(folder / OPTIMIZER_FOLDER):
        from littrainer.checkpoint.sharded_files import load_full_state, nest_optimizer_state

        return folder / OPTIMIZER_FOLDER, nest_optimizer_state(load_full_state(folder / OPTIMIZER_FOLDER))
    return path, load_tensors(path)


def load_optimizer(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Load the state of the optimizer."""
    path, state = read_optimizer_state(folder)
    if is_keyed_by_name(state):
        state = convert_to_param_ids(model, optimizer, state)
    refuse_mismatched_optimizer(path, optimizer, state)
    optimizer.load_state_dict(state)


def refuse_mismatched_optimizer(path: Path, optimizer: Any, state: Any) -> None:
    """Raise a ValueError if a state, with numbers of parameters, is not one of this training's optimizer."""
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        # Such an optimizer may keep its state in another form.
        return
    sizes = [len(group["params"]) for group in state["param_groups"]]
    own_sizes = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != own_sizes:
        raise ValueError(
            f"{path} does not fit the optimizer of this training: its groups have {sizes} parameters and those of the "
            f"optimizer have {own_sizes}. Set up model and arguments as they were when the checkpoint was written, or "
            "load its model and start a new training."
        )


def load_scheduler(schedule: Any, groups: int, folder: Path) -> None:
    """Load the state of the schedule of an optimizer with so many parameter groups."""
    if getattr(schedule, "is_saved_by_engine", False):
        return
    schedule.load_state_dict(_match_group_count(load_tensors(folder / SCHEDULER_NAME), groups))


def load_scaler(scaler: Any, folder: Path) -> None:
    """Load the state of the loss scaling of fp16, if both the checkpoint and this training have one."""
    if scaler is not None and (folder / SCALER_NAME).is_file():
        scaler.load_state_dict(load_tensors(folder / SCALER_NAME))


def load_random_states(folder: Path, args: Any) -> None:
    """Put the random number generators of this process into the states that the checkpoint has."""
    name = random_state_name(args)
    if (folder / name).is_file():
        set_rng_states(read_random_states(folder / name))
    elif read_world_size(folder) == args.world_size:
        # The resume has warned of another number of processes.
        logger.warning("%s has no %s. Random numbers go on from the seed.", folder, name)


# Entries of torch's schedules with one value for each parameter group.
PER_GROUP_KEYS = ("base_lrs", "_last_lr", "lr_lambdas")


def _match_group_count(state: dict[str, Any], groups: int) -> dict[str, Any]:
    # A model that is split between processes has more groups than one that is whole; rates of all groups are the same.
    match_to_model = dict(state)
    for name in PER_GROUP_KEYS:
        values = state.get(name)
        if isinstance(values, list) and values and len(values) != groups and all(one == values[0] for one in values):
            match_to_model[name] = values[:1] * groups
    return match_to_model


def read_random_states(path: Path) -> Any:
    """Return what a file of random states holds."""
    # The file holds NumPy's state tuple, which the weights-only loader accepts only with these names allowed.
    numpy: Any = np
    allowed = [np.ndarray, np.dtype, numpy._core.multiarray._reconstruct, type(np.dtype(np.uint32))]
    return load_tensors(path, allowed)


def find_random_states(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the states that a checkpoint has of each process, by rank."""
    if (folder / RANDOM_STATE_NAME).is_file():
        return {0: read_random_states(folder / RANDOM_STATE_NAME)}
    ranks = [path.stem.rpartition("_")[2] for path in folder.glob(rank_file("*"))]
    return {int(rank): read_random_states(folder / rank_file(rank)) for rank in sorted(ranks) if rank.isdecimal()}
