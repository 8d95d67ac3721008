"""The parameter groups of an optimizer: all parameters but norms and biases have weight decay.

A loaded state has the learning rates, decay and betas of the training that wrote it. If a search changes them in the
middle of a training, `RequestedHyperparameters` restores those of the arguments, and the schedule continues from them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

# Names are matched in lower case against the path from each ancestor down, so that a module called `norm` also shields
# what lies inside it.
EXEMPT_NAMES = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
EXEMPT_LAYERS = (nn.LayerNorm,)
# Key of an optimizer's group that is one of several parts of a group: which group that would be.
GROUP_INDEX = "part_of_group"


def get_decayed_parameter_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that weight decay applies to.

    Parameters inside a `torch.nn.LayerNorm`, and those whose name marks them as a bias or a norm, are left out.
    """
    names: list[str] = []
    for child_name, child in model.named_children():
        if isinstance(child, EXEMPT_LAYERS):
            continue
        below = (f"{child_name}.{name}" for name in get_decayed_parameter_names(child))
        names.extend(name for name in below if not _is_exempt(name))
    names.extend(name for name in model._parameters if not _is_exempt(name))
    return names


def parameter_groups(model: nn.Module, decayed: list[str], weight_decay: float) -> list[dict[str, Any]]:
    """Return two optimizer groups, the decayed parameters first, each in the order of `model.named_parameters()`.

    If only some of a group's parameters are split between processes, each kind has a separate group: torch cannot
    update both together.
    """
    with_decay = set(decayed)
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        *_by_mesh(0, [p for name, p in trainable if name in with_decay], weight_decay),
        *_by_mesh(1, [p for name, p in trainable if name not in with_decay], 0.0),
    ]


def _by_mesh(number: int, parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    parts: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        parts.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    if len(parts) < 2:
        return [{"params": parameters, "weight_decay": weight_decay}]
    return [{"params": part, "weight_decay": weight_decay, GROUP_INDEX: number} for part in parts.values()]


def _is_exempt(name: str) -> bool:
    return EXEMPT_NAMES.search(name.lower()) is not None


# Of a group of parameters: what the arguments decide, and not what an optimizer counts there.
DECIDED_BY_ARGUMENTS = ("weight_decay", "betas", "eps", "momentum", "alpha")
INITIAL_RATE = "initial_lr"


class RequestedHyperparameters:
    """What a new optimizer and schedule have been made with, noted before a checkpoint is loaded into them.

    Parameters:
        optimizer, schedule: as the arguments ask for them; no step has been taken.
    """

    def __init__(self, optimizer: Optimizer, schedule: Any) -> None:
        groups = optimizer.param_groups
        self.groups = [{name: group[name] for name in DECIDED_BY_ARGUMENTS if name in group} for group in groups]
        self.initial_rates = [_number(group.get(INITIAL_RATE, group["lr"])) for group in optimizer.param_groups]
        self.base_rates = list(getattr(schedule, "base_lrs", []))

    def apply_to(self, optimizer: Optimizer, schedule: Any, rate_then: float | None, rate_now: float) -> None:
        """Give an optimizer and schedule that have loaded a checkpoint's state what the arguments ask for.

        Parameters:
            rate_then, rate_now: the `learning_rate` of the arguments that wrote the checkpoint, None if it is not
                known, and the one of now; a group without an initial rate changes by the factor between them.
        """
        if len(optimizer.param_groups) != len(self.groups):
            raise ValueError(
                f"The checkpoint's optimizer has {len(optimizer.param_groups)} groups of parameters and the new one "
                f"{len(self.groups)}, so its learning rates cannot be changed in the middle of training. Let the "
                "hyperparameters leave the groups as they are."
            )
        factors = []
        for group, asked_for, initial in zip(optimizer.param_groups, self.groups, self.initial_rates, strict=True):
            then = _number(group[INITIAL_RATE]) if INITIAL_RATE in group else None
            factors.append(_factor(initial, then) if then is not None else _factor(rate_now, rate_then))
            group.update(asked_for)
            if INITIAL_RATE in group:
                group[INITIAL_RATE] = initial
        if self.base_rates:
            schedule.base_lrs = list(self.base_rates)
        rates = self._rates(optimizer, schedule, factors)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if hasattr(schedule, "_last_lr"):
            schedule._last_lr = list(rates)

    def _rates(self, optimizer: Optimizer, schedule: Any, factors: list[float]) -> list[float]:
        if isinstance(schedule, LambdaLR) and len(schedule.lr_lambdas) == len(self.base_rates) == len(factors):
            step = schedule.last_epoch
            pairs = zip(self.base_rates, schedule.lr_lambdas, strict=True)
            return [_number(base) * factor(step) for base, factor in pairs]
        groups = optimizer.param_groups
        return [_number(group["lr"]) * factor for group, factor in zip(groups, factors, strict=True)]


def have_hyperparameters_changed(then: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> bool:
    """Whether a trial has other hyperparameters than the one whose checkpoint it goes on from.

    Parameters:
        then: what trainer_state.json has of them.
        now: what has been drawn.
    """
    stored_then, stored_now = (json.loads(json.dumps(drawn, default=str)) for drawn in (then, now))
    return stored_then != stored_now


def _number(rate: Any) -> float:
    return rate.item() if isinstance(rate, torch.Tensor) else rate


def _factor(now: float, then: float | None) -> float:
    return now / then if then else 1.0
