"""Methods that a subclass, or a script, overrides: which they are, those never called, those with fewer parameters.

Overrides written for an earlier release, whose Trainer gave them fewer arguments, get those that they take.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from littrainer.loop.loss import MICRO_BATCH_MEAN_MARK


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
    "compute_loss": Signature(2, by_keyword=("num_items_in_batch",)),
    "training_step": Signature(2, by_place=("num_items_in_batch",)),
    "log": Signature(1, by_place=("start_time",)),
    "get_batch_samples": Signature(2, by_place=("device",)),
    "_get_train_sampler": Signature(0, by_place=("train_dataset",)),
    "_maybe_log_save_evaluate": Signature(6, by_place=("start_time",), by_keyword=("learning_rate",)),
}
# Set on what stands in for an override.
IS_ADAPTED = "_takes_what_is_given_today"


def accept_earlier_signatures(instance: object) -> None:
    """Let methods that were set on this Trainer, or on its class after that was made, be called as today."""
    for name in find_overrides(instance, SIGNATURES):
        accept_earlier_signature(instance, name)


def accept_earlier_signature(holder: Any, name: str) -> None:
    """Wrap an override that takes less than today's calls give, and issue a FutureWarning.

    Parameters:
        holder: the class, or the Trainer, that has it.
    """
    method = getattr(holder, name)
    is_class = isinstance(holder, type)
    missing = [] if getattr(method, IS_ADAPTED, False) else _missing(method, SIGNATURES[name], has_self=is_class)
    if not missing:
        return
    fewer = _with_fewer_parameters(method, missing)
    setattr(fewer, IS_ADAPTED, True)
    setattr(fewer, MICRO_BATCH_MEAN_MARK, "num_items_in_batch" in missing)
    setattr(holder, name, fewer)
    class_name = holder.__name__ if is_class else type(holder).__name__
    today = ", ".join(f"{parameter}=None" for parameter in missing)
    warnings.warn(
        f"{class_name}.{name} without {' and '.join(missing)} is an earlier spelling: write {name}(..., {today}).",
        FutureWarning,
        stacklevel=3,
    )


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


Class = TypeVar("Class", bound=type)

# Name -> what the package's classes have under it. Compared by identity: an override made with functools.wraps bears
# the name and the module of ours.
_OF_THE_PACKAGE: dict[str, list[Any]] = {}


def register_package_class(cls: Class) -> Class:
    """Decorate a Trainer class of the package: what it, and its bases, have when it is made is no override."""
    for base in cls.__mro__:
        for name, member in vars(base).items():
            _OF_THE_PACKAGE.setdefault(name, []).append(member)
    return cls


def find_overrides(instance: object, names: Iterable[str]) -> list[str]:
    """Return the named methods that this instance, its class or a class between that and ours overrides."""
    own, cls = [], type(instance)
    for name in names:
        ours, found = _OF_THE_PACKAGE.get(name, ()), getattr(cls, name, None)
        # Python finds a function by itself much faster than `getattr_static` does, which finds all else.
        is_ours = found is None or found in ours or inspect.getattr_static(cls, name) in ours
        if name in vars(instance) or not is_ours:
            own.append(name)
    return own


# Methods that transformers calls and that nothing here calls: an override would be ignored, so it is refused.
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
    """Refuse a Trainer that overrides what is never called, in a subclass, on the class or on the instance.

    Raises:
        NotImplementedError: it has some; all are named, with what to override instead.
    """
    ignored = [f"{name} ({NEVER_CALLED[name]})" for name in find_overrides(instance, NEVER_CALLED)]
    if ignored:
        raise NotImplementedError(
            f"{type(instance).__name__} overrides what littrainer never calls: {'; '.join(ignored)}. Or run the script "
            "with plain `python`, which uses transformers' own Trainer."
        )
