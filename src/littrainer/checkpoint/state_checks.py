"""Whether the states in a checkpoint are those of the optimizer, schedule and loss scaling of a training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# Entries of torch's optimizers that have the shape of their parameter.
SHAPED_AS_PARAMETER = frozenset(
    {
        "acc_delta",
        "ax",
        "exp_avg",
        "exp_avg_sq",
        "exp_inf",
        "grad_avg",
        "max_exp_avg_sq",
        "momentum_buffer",
        "prev",
        "square_avg",
        "step_size",
        "sum",
    }
)
# Entries of torch's schedules with one value for each parameter group.
SCHEDULED_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas")
# Sentences in an error; the rest is counted.
LONGEST_LIST = 6


def optimizer_differences(optimizer: Any, state: Any, names: Mapping[int, str] | None = None) -> list[str]:
    """What keeps a state from being loaded into an optimizer; empty where it fits.

    Parameters:
        names: the names of parameters, by `id`.
    """
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        # It may keep its state in a form of its own.
        return []
    if not isinstance(state, dict) or not {"state", "param_groups"} <= set(state):
        return ["it holds no optimizer's state"]
    groups, own_groups = state["param_groups"], optimizer.param_groups
    if not isinstance(groups, list) or not all(isinstance(group, dict) and "params" in group for group in groups):
        return ["its param_groups are not parameter groups"]
    if len(groups) != len(own_groups):
        return [f"it has {len(groups)} parameter groups and the optimizer has {len(own_groups)}"]
    differences = [
        f"parameter group {number} has {len(group['params'])} parameters in it and {len(own['params'])} in training"
        for number, (group, own) in enumerate(zip(groups, own_groups, strict=True))
        if len(group["params"]) != len(own["params"])
    ]
    if differences or not type(optimizer).__module__.startswith("torch.optim"):
        return differences
    for number, (group, own) in enumerate(zip(groups, own_groups, strict=True)):
        for index, parameter in zip(group["params"], own["params"], strict=True):
            name = (names or {}).get(id(parameter), f"parameter {index}")
            differences += _shape_differences(number, name, parameter, state["state"].get(index, {}))
    more = len(differences) - LONGEST_LIST
    return differences[:LONGEST_LIST] + ([f"and {more} more"] if more > 0 else [])


def _shape_differences(group: int, name: str, parameter: torch.Tensor, entries: Any) -> list[str]:
    if not isinstance(entries, dict):
        return [f"the entry of {name} in parameter group {group} is no state"]
    return [
        f"{entry} of {name} (parameter group {group}) is {tuple(value.shape)} in the checkpoint and the parameter "
        f"{tuple(parameter.shape)}"
        for entry, value in entries.items()
        if entry in SHAPED_AS_PARAMETER and isinstance(value, torch.Tensor) and value.shape != parameter.shape
    ]


def fitted_to_groups(state: Any, groups: int) -> Any:
    """A schedule's state for another number of parameter groups, where it is the same for all of them.

    A model that is split between processes has more groups than one that is whole.
    """
    if not isinstance(state, dict):
        return state
    fitted = dict(state)
    for name in SCHEDULED_BY_GROUP:
        values = state.get(name)
        if isinstance(values, list) and values and len(values) != groups and all(one == values[0] for one in values):
            fitted[name] = values[:1] * groups
    return fitted


def schedule_differences(schedule: Any, state: Any) -> list[str]:
    """What keeps a state from being loaded into a schedule; empty where it fits."""
    if not isinstance(state, dict):
        return ["it holds no schedule's state"]
    stored, own = state.get("base_lrs"), getattr(schedule, "base_lrs", None)
    if isinstance(stored, list) and isinstance(own, list) and len(stored) != len(own):
        return [f"it has {len(stored)} base learning rates and the schedule has {len(own)}"]
    return []


def scaler_differences(scaler: Any, state: Any) -> list[str]:
    """What keeps a state from being loaded into a loss scaling; empty where it fits."""
    if not isinstance(state, dict):
        return ["it holds no state of a loss scaling"]
    absent = sorted(set(scaler.state_dict()) - set(state))
    wrong = sorted(name for name, value in state.items() if not isinstance(value, (int, float)))
    return ([f"it lacks {', '.join(absent)}"] if absent else []) + (
        [f"{', '.join(wrong)} is no number"] if wrong else []
    )
