"""Overrides written for a release whose Trainer gave them fewer arguments: they get those that they take."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from littrainer.errors.lazy_isinstance import package_of
from littrainer.training.loss import RETURNS_THE_MEAN

if TYPE_CHECKING:
    from littrainer.trainer import Trainer


class Signature(NamedTuple):
    """How an override is called.

    Parameters:
        first: parameters that it always had, which are given by place.
        by_place: parameters that it got later, which are given by place after these.
        by_keyword: parameters that it got later, which are given by keyword.
    """

    first: int
    by_place: tuple[str, ...] = ()
    by_keyword: tuple[str, ...] = ()


SIGNATURES: dict[str, Signature] = {
    "compute_loss": Signature(2, by_keyword=("return_outputs", "num_items_in_batch")),
    "training_step": Signature(2, by_place=("num_items_in_batch",)),
    "log": Signature(1, by_place=("start_time",)),
    "get_batch_samples": Signature(2, by_place=("device",)),
    "_get_train_sampler": Signature(0, by_place=("train_dataset",)),
    "_maybe_log_save_evaluate": Signature(6, by_place=("start_time",), by_keyword=("learning_rate",)),
}
# Of the parameters that are not None where the caller leaves them out.
DEFAULTS = {"return_outputs": False}
# Packages whose frames lie between the class statement, or the call of a method, and the warning of it.
NOT_THE_SCRIPT = ("littrainer", "abc")
# Set on what stands in for an override.
IS_ADAPTED = "_takes_what_is_given_today"


def accept_earlier_signatures(trainer: Trainer) -> None:
    """Let methods that were set on this Trainer, or on its class after that was made, be called as today."""
    for name in trainer._own_methods(*SIGNATURES):
        accept_earlier_signature(trainer, name)


def accept_earlier_signature(owner: Any, name: str) -> None:
    """Put a method in the place of an override that takes less than today's calls give, with a FutureWarning.

    Parameters:
        owner: the class, or the Trainer, that has it.
    """
    method = getattr(owner, name)
    is_class = isinstance(owner, type)
    missing = [] if getattr(method, IS_ADAPTED, False) else _missing(method, SIGNATURES[name], has_self=is_class)
    if not missing:
        return
    fewer = _with_outputs(method, missing) if "return_outputs" in missing else _with_fewer_parameters(method, missing)
    setattr(fewer, IS_ADAPTED, True)
    setattr(fewer, RETURNS_THE_MEAN, "num_items_in_batch" in missing)
    setattr(owner, name, fewer)
    class_name = owner.__name__ if is_class else type(owner).__name__
    today = ", ".join(f"{parameter}={DEFAULTS.get(parameter)}" for parameter in missing)
    warnings.warn(
        f"{class_name}.{name} without {' and '.join(missing)} is an earlier spelling: write {name}(..., {today}).",
        FutureWarning,
        stacklevel=_frames_to_the_script() - 1,
    )


def _frames_to_the_script() -> int:
    """As `warnings.warn` counts them from here: a class statement or a call of train() outside of this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and package_of(frame) in NOT_THE_SCRIPT:
        level, frame = level + 1, frame.f_back
    return level


def _missing(method: Any, signature: Signature, has_self: bool) -> list[str]:
    """The parameters that a method does not take; none where it takes any, or where it is none of ours to judge."""
    try:
        parameters = list(inspect.signature(method).parameters.values())[int(has_self) :]
    except (TypeError, ValueError):
        return []
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(by_place) < signature.first:
        return []
    missing: list[str] = []
    # The parameters may have other names where they are given by place.
    if not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        missing += signature.by_place[len(by_place) - signature.first :]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        names = {p.name for p in parameters}
        missing += [name for name in signature.by_keyword if name not in names]
    return missing


def _with_fewer_parameters(method: Callable[..., Any], missing: list[str]) -> Callable[..., Any]:
    parameters = inspect.signature(method).parameters.values()
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    most = None if takes_any else len(parameters)

    @functools.wraps(method)
    def with_fewer_parameters(*args: Any, **kwargs: Any) -> Any:
        for name in missing:
            kwargs.pop(name, None)
        return method(*args[:most], **kwargs)

    return with_fewer_parameters


def _with_outputs(method: Callable[..., Any], missing: list[str]) -> Callable[..., Any]:
    """A `compute_loss` that returns nothing but the loss; the outputs are what the model returned on the way to it."""
    loss_of = _with_fewer_parameters(method, missing)

    @functools.wraps(method)
    def loss_and_outputs(*args: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        if not return_outputs:
            return loss_of(*args, **kwargs)
        model = next((value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module)), None)
        seen: list[Any] = [{}]
        handle = None if model is None else model.register_forward_hook(lambda *call: seen.append(call[-1]))
        try:
            loss = loss_of(*args, **kwargs)
        finally:
            if handle is not None:
                handle.remove()
        return loss, seen[-1]

    return loss_and_outputs
