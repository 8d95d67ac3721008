"""Overridden methods of a Trainer: finding them, calling earlier signatures, refusing those that are never called."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from littrainer.loop.loss import MICRO_BATCH_MEAN_MARK


class Signature(NamedTuple):
    """The call of an overridable method.

    Parameters:
        first: number of parameters of every release, which are passed by position.
        by_place, by_keyword: later parameters that are passed by position, or by keyword.
    """

    first: int
    by_place: tuple[str, ...] = ()
    by_keyword: tuple[str, ...] = ()


SIGNATURES: dict[str, Signature] = {
    "compute_loss": Signature(2, by_keyword=("num_items_in_batch",)),
    "training_step": Signature(2, by_place=("num_items_in_batch",)),
    "log": Signature(1, by_place=("start_time",)),
    "get_batch_samples": Signature(2, by_place=("device",)),
    "_get_train_sampler": Signature(0, by_place=("train_dataset",)),
    "_maybe_log_save_evaluate": Signature(6, by_place=("start_time",), by_keyword=("learning_rate",)),
}
# Attribute of a wrapper around an override.
IS_ADAPTED = "_has_adapted_signature"


def accept_earlier_signatures(instance: object) -> None:
    """Wrap methods with earlier signatures that were set on a Trainer, or on its class after its definition."""
    for name in find_overrides(instance, *SIGNATURES):
        accept_earlier_signature(instance, name)


def accept_earlier_signature(holder: Any, name: str) -> None:
    """Wrap an override that lacks later parameters, with a FutureWarning."""
    method = getattr(holder, name)
    is_class = isinstance(holder, type)
    signature = SIGNATURES[name]
    missing = [] if getattr(method, IS_ADAPTED, False) else _find_missing(method, signature, has_self=is_class)
    if not missing:
        return
    wrapper = _drop_parameters(method, missing)
    setattr(wrapper, IS_ADAPTED, True)
    setattr(wrapper, MICRO_BATCH_MEAN_MARK, "num_items_in_batch" in missing)
    setattr(holder, name, wrapper)
    class_name = holder.__name__ if is_class else type(holder).__name__
    today = ", ".join(f"{parameter}=None" for parameter in missing)
    warnings.warn(
        f"{class_name}.{name} without {' and '.join(missing)} is an earlier spelling: write {name}(..., {today}).",
        FutureWarning,
        stacklevel=3,
    )


def _find_missing(method: Any, signature: Signature, has_self: bool) -> list[str]:
    try:
        parameters = list(inspect.signature(method).parameters.values())[int(has_self) :]
    except (TypeError, ValueError):
        return []
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < signature.first:
        return []
    missing: list[str] = []
    # By number, since positional parameters may have other names.
    if not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        missing += signature.by_place[len(positional) - signature.first :]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        names = {p.name for p in parameters}
        missing += [name for name in signature.by_keyword if name not in names]
    return missing


def _drop_parameters(method: Callable[..., Any], missing: list[str]) -> Callable[..., Any]:
    parameters = inspect.signature(method).parameters.values()
    limit = None if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(parameters)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in missing:
            kwargs.pop(name, None)
        return method(*args[:limit], **kwargs)

    return call


Class = TypeVar("Class", bound=type)

# Name -> members of the package's classes. Compared by identity, since functools.wraps copies names and modules.
_PACKAGE_MEMBERS: dict[str, list[Any]] = {}


def register_package_class(cls: Class) -> Class:
    """Register the members of a class of the package, which are no overrides."""
    for base in cls.__mro__:
        for name, member in vars(base).items():
            _PACKAGE_MEMBERS.setdefault(name, []).append(member)
    return cls


def find_overrides(instance: object, *names: str) -> list[str]:
    overrides, cls = [], type(instance)
    for name in names:
        members, method = _PACKAGE_MEMBERS.get(name, ()), getattr(cls, name, None)
        # `getattr` is much faster than `getattr_static`, and enough for functions.
        is_package_member = method is None or method in members or inspect.getattr_static(cls, name) in members
        if name in vars(instance) or not is_package_member:
            overrides.append(name)
    return overrides


# Method that only transformers calls -> alternative.
NEVER_CALLED: dict[str, str] = {
    "_run_epoch": "Lightning runs the epochs: override training_step, get_batch_samples or _inner_training_loop, or "
    "add a callback with on_epoch_begin and on_epoch_end",
    "_prepare_for_training": "override create_optimizer, create_scheduler, _wrap_model or "
    "_load_optimizer_and_scheduler, or add a callback with on_train_begin",
    "_build_accelerator_args": "Lightning takes the accelerator's place: override create_accelerator_and_postprocess, "
    "or pass lightning={...}",
    "_prepare_context_parallel_inputs": "override _prepare_inputs",
    "_defer_fsdp_gradient_reduction": "pass a strategy as lightning={...}",
    "_sync_replicated_trainable_parameters": "add a callback with on_train_begin",
}


def refuse_ignored_overrides(instance: object) -> None:
    """Raise a NotImplementedError for overrides that are never called."""
    ignored = [f"{name} ({NEVER_CALLED[name]})" for name in find_overrides(instance, *NEVER_CALLED)]
    if ignored:
        raise NotImplementedError(
            f"{type(instance).__name__} overrides what littrainer never calls: {'; '.join(ignored)}. Or run the script "
            "with plain `python`, which uses transformers' own Trainer."
        )
