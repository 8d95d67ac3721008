"""Parameter groups of an optimizer: all parameters except norms and biases have weight decay."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

# Matched in lower case in the whole name, so that a module called `norm` also exempts its children.
EXEMPT_NAMES = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
EXEMPT_LAYERS = (nn.LayerNorm,)
# Index of the group before a split by device mesh.
GROUP_INDEX = "part_of_group"


def get_decayed_parameter_names(model: nn.Module, prefix: str = "") -> list[str]:
    """Return the parameters with weight decay: all but biases, norms and contents of `torch.nn.LayerNorm`."""
    names: list[str] = []
    for child_name, child in model.named_children():
        if not isinstance(child, EXEMPT_LAYERS):
            names += get_decayed_parameter_names(child, f"{prefix}{child_name}.")
    own_names = [prefix + name for name in model._parameters]
    return names + [name for name in own_names if not EXEMPT_NAMES.search(name.lower())]


def parameter_groups(model: nn.Module, decayed: list[str], weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups, the decayed parameters first, each in the model's order.

    Sharded and replicated parameters are separate groups, since torch cannot update both together.
    """
    decayed_names = set(decayed)
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        *_split_by_mesh(0, [p for name, p in trainable if name in decayed_names], weight_decay),
        *_split_by_mesh(1, [p for name, p in trainable if name not in decayed_names], 0.0),
    ]


def _split_by_mesh(index: int, parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    parts: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        parts.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    if len(parts) < 2:
        return [{"params": parameters, "weight_decay": weight_decay}]
    return [{"params": part, "weight_decay": weight_decay, GROUP_INDEX: index} for part in parts.values()]


# Keys set by TrainingArguments, not by the state.
ARGUMENT_KEYS = ("weight_decay", "betas", "eps", "momentum", "alpha")
INITIAL_RATE = "initial_lr"


class RequestedHyperparameters:
    """Hyperparameters of a new optimizer and schedule, recorded before a checkpoint is loaded into them."""

    def __init__(self, optimizer: Optimizer, schedule: Any) -> None:
        groups = optimizer.param_groups
        self.groups = [{name: group[name] for name in ARGUMENT_KEYS if name in group} for group in groups]
        self.initial_rates = [_to_float(group.get(INITIAL_RATE, group["lr"])) for group in groups]
        self.base_rates = list(getattr(schedule, "base_lrs", []))

    def apply_to(self, optimizer: Optimizer, schedule: Any, rate_then: float | None, rate_now: float) -> None:
        """Set the requested hyperparameters after a checkpoint is loaded.

        Parameters:
            rate_then: `learning_rate` of the training that wrote the checkpoint, or None.
            rate_now: `learning_rate` of the arguments. Groups without an initial rate are scaled by their ratio.
        """
        if len(optimizer.param_groups) != len(self.groups):
            raise ValueError(
                f"The checkpoint's optimizer has {len(optimizer.param_groups)} groups of parameters and the new one "
                f"{len(self.groups)}, so its learning rates cannot be changed in the middle of training. Let the "
                "hyperparameters leave the groups as they are."
            )
        factors = []
        for group, requested, initial in zip(optimizer.param_groups, self.groups, self.initial_rates, strict=True):
            now, then = rate_now, rate_then
            if INITIAL_RATE in group:
                now, then = initial, _to_float(group[INITIAL_RATE])
                group[INITIAL_RATE] = initial
            factors.append(now / then if then else 1.0)
            group.update(requested)
        if self.base_rates:
            schedule.base_lrs = list(self.base_rates)
        rates = self._compute_rates(optimizer, schedule, factors)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if hasattr(schedule, "_last_lr"):
            schedule._last_lr = list(rates)

    def _compute_rates(self, optimizer: Optimizer, schedule: Any, factors: list[float]) -> list[float]:
        if isinstance(schedule, LambdaLR) and len(schedule.lr_lambdas) == len(self.base_rates) == len(factors):
            step = schedule.last_epoch
            pairs = zip(self.base_rates, schedule.lr_lambdas, strict=True)
            return [_to_float(base) * factor(step) for base, factor in pairs]
        groups = optimizer.param_groups
        return [_to_float(group["lr"]) * factor for group, factor in zip(groups, factors, strict=True)]


def have_hyperparameters_changed(then: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> bool:
    """Return whether a trial's hyperparameters differ from those of the trial that it resumes."""
    stored_then, stored_now = (json.loads(json.dumps(params, default=str)) for params in (then, now))
    return stored_then != stored_now


def _to_float(rate: Any) -> float:
    return rate.item() if isinstance(rate, torch.Tensor) else rate
