"""Which parameters weight decay applies to: all but norms and biases."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

# Names are matched in lower case against the path from each ancestor down, so that a module called `norm` also shields
# what lies inside it.
EXEMPT_NAMES = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
EXEMPT_LAYERS = (nn.LayerNorm,)
# Key of an optimizer's group that is one of several parts of a group: which group that would be.
PART_OF = "part_of_group"


def decayed_parameter_names(model: nn.Module) -> list[str]:
    """Names of the parameters that weight decay applies to.

    Parameters inside a `torch.nn.LayerNorm`, and those whose name marks them as a bias or a norm, are left out.
    """
    names: list[str] = []
    for child_name, child in model.named_children():
        if isinstance(child, EXEMPT_LAYERS):
            continue
        below = (f"{child_name}.{name}" for name in decayed_parameter_names(child))
        names.extend(name for name in below if not _is_exempt(name))
    names.extend(name for name in model._parameters if not _is_exempt(name))
    return names


def parameter_groups(model: nn.Module, decayed: list[str], weight_decay: float) -> list[dict[str, Any]]:
    """Two optimizer groups, the decayed parameters first, each in the order of `model.named_parameters()`.

    Where some of a group's parameters are split between processes and others are not, each kind has a group of its own:
    an optimizer computes a group in one go, and torch cannot where it holds both.
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
    return [{"params": part, "weight_decay": weight_decay, PART_OF: number} for part in parts.values()]


def _is_exempt(name: str) -> bool:
    return EXEMPT_NAMES.search(name.lower()) is not None
