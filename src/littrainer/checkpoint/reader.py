"""Loading of trainer, optimizer, scheduler and RNG states; damage, pickled code and mismatches raise a ValueError."""

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
    record = load_tensors(folder / RESUME_RECORD_NAME) if (folder / RESUME_RECORD_NAME).is_file() else {}
    if "sizes" in record:
        return int(record["sizes"]["world_size"])
    return len(list(folder.glob(rank_file("*")))) or 1


def read_state(folder: Path) -> TrainerState:
    """Load the trainer state of a checkpoint.

    Since users move runs, the best checkpoint is sought next to this checkpoint, then at the recorded path; else it is
    None.
    """
    state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
    if state.best_model_checkpoint is None:
        return state
    recorded = Path(state.best_model_checkpoint)
    sibling = folder.parent / recorded.name
    if sibling.is_dir() and not (recorded.is_dir() and recorded.samefile(sibling)):
        state.best_model_checkpoint = str(sibling)
    elif not recorded.is_dir():
        logger.warning("The best checkpoint so far, %s, is gone; it is not loaded.", state.best_model_checkpoint)
        state.best_model_checkpoint = None
    return state


def read_optimizer_state(folder: Path) -> tuple[Path, Any]:
    """Return the file and the full state of the optimizer, by parameter number or name."""
    path = folder / OPTIMIZER_NAME
    if not path.is_file() and (folder / FSDP_OPTIMIZER_NAME).is_file():
        path = folder / FSDP_OPTIMIZER_NAME
    elif not path.is_file() and has_sharded_state(folder / OPTIMIZER_FOLDER):
        from littrainer.checkpoint.sharded_files import load_full_state, nest_optimizer_state

        return folder / OPTIMIZER_FOLDER, nest_optimizer_state(load_full_state(folder / OPTIMIZER_FOLDER))
    return path, load_tensors(path)


def load_optimizer(model: nn.Module, optimizer: Any, folder: Path) -> None:
    path, state = read_optimizer_state(folder)
    if is_keyed_by_name(state):
        state = convert_to_param_ids(model, optimizer, state)
    refuse_mismatched_optimizer(path, optimizer, state)
    optimizer.load_state_dict(state)


def refuse_mismatched_optimizer(path: Path, optimizer: Any, state: Any) -> None:
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    sizes = [len(group["params"]) for group in state["param_groups"]]
    expected_sizes = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != expected_sizes:
        raise ValueError(
            f"{path} does not fit the optimizer of this training: its groups have {sizes} parameters and those of the "
            f"optimizer have {expected_sizes}. Set up model and arguments as they were when the checkpoint was "
            "written, or load its model and start a new training."
        )


def load_scheduler(schedule: Any, groups: int, folder: Path) -> None:
    if getattr(schedule, "is_saved_by_engine", False):
        return
    schedule.load_state_dict(_match_group_count(load_tensors(folder / SCHEDULER_NAME), groups))


def load_scaler(scaler: Any, folder: Path) -> None:
    if scaler is not None and (folder / SCALER_NAME).is_file():
        scaler.load_state_dict(load_tensors(folder / SCALER_NAME))


def load_random_states(folder: Path, args: Any) -> None:
    name = random_state_name(args)
    if (folder / name).is_file():
        set_rng_states(read_random_states(folder / name))
    elif read_world_size(folder) == args.world_size:
        logger.warning("%s has no %s. Random numbers go on from the seed.", folder, name)


PER_GROUP_KEYS = ("base_lrs", "_last_lr", "lr_lambdas")


def _match_group_count(state: dict[str, Any], groups: int) -> dict[str, Any]:
    # A sharded model has more groups, all with the same learning rate.
    matched = dict(state)
    for name in PER_GROUP_KEYS:
        values = state.get(name)
        if isinstance(values, list) and values and len(values) != groups and values.count(values[0]) == len(values):
            matched[name] = values[:1] * groups
    return matched


def read_random_states(path: Path) -> Any:
    numpy: Any = np
    allowed = [np.ndarray, np.dtype, numpy._core.multiarray._reconstruct, type(np.dtype(np.uint32))]
    return load_tensors(path, allowed)


def find_random_states(folder: Path) -> dict[int, dict[str, Any]]:
    """Load all random states, by rank."""
    if (folder / RANDOM_STATE_NAME).is_file():
        return {0: read_random_states(folder / RANDOM_STATE_NAME)}
    ranks = [path.stem.rpartition("_")[2] for path in folder.glob(rank_file("*"))]
    return {int(rank): read_random_states(folder / rank_file(rank)) for rank in sorted(ranks) if rank.isdecimal()}
