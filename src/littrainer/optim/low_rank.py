"""GaLore and APOLLO: which weights `optim_target_modules` projects, and their parameter groups."""

from __future__ import annotations

import logging
import re
from typing import Any

from torch import nn

from littrainer.arguments.choices import ParallelMode
from littrainer.optim.entries import Keywords, Request, adam_only
from littrainer.optim.layerwise import LayerwiseOptimizer, step_at_each_gradient

logger = logging.getLogger(__name__)

ALL_LINEAR = ("all-linear", "all_linear")

# What a projected group holds, where `optim_args` does not say otherwise.
PROJECTION: dict[str, Keywords] = {
    "galore": {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"},
    "apollo": {
        "rank": 128,
        "proj": "random",
        "scale_type": "channel",
        "update_proj_gap": 200,
        "scale": 1.0,
        "proj_type": "std",
    },
}


def parameter_groups_with_projection(request: Request) -> list[dict[str, Any]]:
    """Two groups: all parameters but the targets, and the targets with the settings of their projection.

    Raises:
        ValueError: `optim_target_modules` is not given, or no linear layer is among what it names.
        TypeError: `optim_target_modules` is neither a list nor a string.
    """
    model = _model(request)
    names = {f"{module}.weight" for module in _target_modules(model, request)}
    parameters = list(model.named_parameters())
    return [
        {"params": [parameter for name, parameter in parameters if name not in names]},
        {"params": [parameter for name, parameter in parameters if name in names], **_projection(request)},
    ]


def one_optimizer_for_each_parameter(
    optimizer_class: Any, keywords: Keywords, groups: list[dict[str, Any]], request: Request
) -> tuple[type[LayerwiseOptimizer], Keywords]:
    """The stand-in of the layer-wise variants, after their optimizers are set to step in the backward pass.

    Raises:
        ValueError: gradients are to be accumulated, which leaves nothing to step on in between.
        NotImplementedError: several processes, whose gradients are not averaged yet when these optimizers step.
    """
    args = request.args
    if args.parallel_mode == ParallelMode.DISTRIBUTED:
        raise NotImplementedError(f"optim={request.optim!r} works on one process only; choose one without `layerwise`.")
    if args.gradient_accumulation_steps != 1:
        raise ValueError(
            f"optim={request.optim!r} steps at each backward pass and cannot accumulate; set "
            f"gradient_accumulation_steps=1 instead of {args.gradient_accumulation_steps}."
        )
    if args.max_grad_norm:
        logger.warning("optim=%r steps before gradients can be clipped: max_grad_norm has no effect.", request.optim)
    optimizers = {
        parameter: optimizer_class([{**group, "params": [parameter]}], **keywords)
        for group in groups
        for parameter in group["params"]
    }
    step_at_each_gradient(optimizers)
    return LayerwiseOptimizer, {**keywords, "optimizer_dict": optimizers}


def _model(request: Request) -> nn.Module:
    if request.model is None:
        raise ValueError(f"optim={request.optim!r} needs the model: call get_optimizer_cls_and_kwargs(args, model).")
    return request.model


def _projection(request: Request) -> Keywords:
    family = request.optim.split("_")[0]
    own = adam_only(request) if family == "apollo" else {}
    return {**PROJECTION[family], **request.settings, **own}


def _target_modules(model: nn.Module, request: Request) -> list[str]:
    targets: Any = request.args.optim_target_modules
    if targets is None:
        raise ValueError(
            f"optim={request.optim!r} projects the weights of some modules: name them in optim_target_modules, as a "
            "list, a regular expression or 'all-linear'."
        )
    if not isinstance(targets, (str, list)):
        raise TypeError(
            "optim_target_modules must be a list of names, a regular expression or 'all-linear', got "
            f"{type(targets).__name__}."
        )
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            if targets in ALL_LINEAR or is_target(targets, name):
                found.append(name)
        elif is_named(targets, name):
            logger.warning("optim_target_modules names %s, which is no linear layer; it is not projected.", name)
    if not found:
        raise ValueError(f"optim_target_modules={targets!r} names no linear layer of {type(model).__name__}.")
    return found


def is_target(targets: str | list[str], name: str) -> bool:
    """Whether a module's path is one that `optim_target_modules` means.

    Parameters:
        targets: a regular expression for the whole path; or a list of parts of paths and of such expressions.
    """
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(target in name or re.fullmatch(target, name) is not None for target in targets)


def is_named(targets: str | list[str], name: str) -> bool:
    """Whether a path is meant by its name and not by an expression that fits much else too."""
    return targets == name if isinstance(targets, str) else any(target in name for target in targets)
