"""From the parameters of a trial to training arguments: names checked, values of the declared types, all rules kept."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import difflib
import inspect
import logging
import types
import typing
from collections.abc import Container, Mapping
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, Union

from littrainer.arguments.did_you_mean import nearest_name, suggestion
from littrainer.arguments.earlier_names import earlier_names_of
from littrainer.arguments.normalization import ALIASES, CHOICE_FIELDS, apply_warmup_ratio, join_aliases
from littrainer.arguments.parser import truth
from littrainer.arguments.training_arguments import TrainingArguments
from littrainer.callbacks.state import hp_params
from littrainer.distributed.failure_report import FailedElsewhere, LostProcess
from littrainer.errors.lazy_isinstance import is_a
from littrainer.errors.notes import kind_of
from littrainer.search.failures import SearchMistake

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)

# So similar to the name of an argument (1: equal) no parameter of a model is meant to be.
MISSPELLED = 0.9
# Arguments that a Trainer reads only when it is made.
READ_AT_CONSTRUCTION = ("report_to", "disable_tqdm")
# What Ray's configuration may hold for its own logger.
NO_PARAMETERS = ("wandb",)


def parameters_of(trainer: Trainer, trial: Any) -> dict[str, Any]:
    """What a trial sets: what the space asks an Optuna trial for, or what Ray Tune or a sweep has drawn.

    Raises:
        SearchMistake: the space fails, is empty or returns no dict.
    """
    if isinstance(trial, Mapping):
        return drawn_in(trial)
    space = checked_space(asked(trainer.hp_space, trial))
    if not space and not hp_params(trial) and not gives_trial_to_model(trainer):
        raise SearchMistake(EMPTY_SPACE)
    return space


def drawn_in(trial: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters in what Ray Tune or a sweep has drawn."""
    return {name: value for name, value in trial.items() if name not in NO_PARAMETERS}


EMPTY_SPACE = (
    "hp_space returned an empty dict: there is nothing to search for. Return the arguments to set by name, such as "
    '{"learning_rate": trial.suggest_float("learning_rate", 1e-5, 1e-3, log=True)}.'
)


def asked(space: Any, trial: Any) -> Any:
    """What a space function returns for a trial.

    Raises:
        SearchMistake: the function fails. That it prunes the trial, or that another process has failed, is passed on.
    """
    try:
        return space(trial)
    except Exception as error:
        if is_a(error, "pruned trial") or isinstance(error, (SearchMistake, FailedElsewhere, LostProcess)):
            raise
        raise SearchMistake(f"hp_space failed: {type(error).__name__}: {error}") from error


def checked_space(space: Any, may_be_empty: bool = True) -> dict[str, Any]:
    """What a space function returned.

    Parameters:
        may_be_empty: whether the parameters may all be the model's, which are asked for later.

    Raises:
        SearchMistake: it is no dict with names as keys, or empty where it may not be.
    """
    if not isinstance(space, Mapping):
        what = "nothing" if space is None else kind_of(space)
        raise SearchMistake(
            f"hp_space returned {what}; it has to return a dict of arguments to set by name, such as "
            '{"learning_rate": ...}.'
        )
    no_names = [name for name in space if not isinstance(name, str)]
    if no_names:
        raise SearchMistake(f"hp_space returned a dict with {no_names[0]!r} as a key; keys are names of arguments.")
    if not space and not may_be_empty:
        raise SearchMistake(EMPTY_SPACE)
    return dict(space)


def gives_trial_to_model(trainer: Trainer) -> bool:
    """Whether the model is made from the trial, so that parameters may be meant for it."""
    if trainer._own_methods("call_model_init"):
        return True
    return trainer.model_init is not None and len(inspect.signature(trainer.model_init).parameters) == 1


def names_for_model(trainer: Trainer, parameters: Mapping[str, Any]) -> list[str]:
    """Those of a trial's parameters that are no arguments, and so are for a model that is made from the trial.

    Raises:
        SearchMistake: the model is not made from it, or an argument cannot be set by a trial.
    """
    args: Any = trainer.args
    known = {field.name for field in dataclasses.fields(args) if not field.name.startswith("_")}
    earlier = earlier_names_of(type(args), parameters)
    unknown = [name for name in parameters if name not in known and name not in earlier and not _is_own(args, name)]
    if unknown and not gives_trial_to_model(trainer):
        raise SearchMistake(_told_of_unknown(type(args).__name__, unknown, known))
    for name in unknown:
        _check_is_not_misspelled(name, type(args).__name__, frozenset(known))
    fixed = [name for name in parameters if name in READ_AT_CONSTRUCTION]
    if fixed:
        raise SearchMistake(
            f"A trial cannot set {', '.join(fixed)}, which is read when the Trainer is made: set it in the arguments."
        )
    return unknown


def set_parameters(trainer: Trainer, parameters: Mapping[str, Any]) -> set[str]:
    """Set arguments to the parameters of a trial; either all of them are set or none.

    Parameters:
        parameters: values by names of arguments, or by earlier names of them.

    Returns:
        names of the arguments that have another value than before.

    Raises:
        SearchMistake: a name is unknown, or a value is not of its argument's type.
        ValueError: values are out of range, or do not go together.
        NotImplementedError: a value is not supported.
    """
    args: Any = trainer.args
    unknown = names_for_model(trainer, parameters)
    known = {field.name for field in dataclasses.fields(args) if not field.name.startswith("_")}
    candidate = copy.copy(args)
    earlier = earlier_names_of(type(args), parameters)
    for name, value in parameters.items():
        if name not in unknown:
            plain = _plain(value)
            setattr(candidate, name, plain if name in earlier else converted(args, name, plain))
    _resolve_pairs(candidate, parameters)
    if isinstance(args, TrainingArguments):
        # The package's own part of the constructor; a subclass's has been carried out, and once is what it expects.
        try:
            TrainingArguments.__post_init__(candidate)
        except TypeError as error:
            raise SearchMistake(f"A trial sets an argument to a value of another type: {error}") from error
        candidate._asked_for_bars = args._asked_for_bars
    changed = {name for name in known if differs(getattr(candidate, name, None), getattr(args, name, None))}
    vars(args).update(vars(candidate))
    return changed


def _is_own(args: Any, name: str) -> bool:
    """Whether arguments have an attribute of that name, which is no field of theirs and can be set."""
    member = inspect.getattr_static(type(args), name, None)
    if name.startswith("_") or (member is None and name not in vars(args)):
        return False
    return not callable(member) and not isinstance(member, (property, staticmethod, classmethod))


def _told_of_unknown(owner: str, unknown: list[str], known: set[str]) -> str:
    found = [f"{name!r} is unknown, {suggestion(name, known)}" for name in unknown]
    return (
        f"The parameters of a trial are arguments, and {owner} does not have these: {'; '.join(found)}. Parameters of "
        "the model need a model_init that takes the trial."
    )


@cache
def _check_is_not_misspelled(name: str, owner: str, known: frozenset[str]) -> None:
    """Refuse a parameter for the model that is all but named as an argument, and tell once of one that is similar."""
    meant = nearest_name(name, sorted(known))
    if meant is None:
        return
    if difflib.SequenceMatcher(None, name, meant).ratio() >= MISSPELLED:
        raise SearchMistake(
            f"{name!r} is no argument of {owner}: did you mean {meant!r}? If it is for the model, name it otherwise."
        )
    logger.warning("%r is no argument of %s, so model_init alone gets it. Or is it %r?", name, owner, meant)


def settle_pairs(args: Any, given: Container[str]) -> None:
    """Let arguments that a script has set after they were made decide over other names of the same things.

    Parameters:
        given: names of the arguments that it has set.
    """
    if not isinstance(args, TrainingArguments):
        return
    _follow_aliases(args, given)
    join_aliases(args)
    if "warmup_ratio" in given:
        apply_warmup_ratio(args)


def _follow_aliases(args: Any, given: Container[str]) -> None:
    for alias, name in ALIASES.items():
        if alias in given and name not in given:
            setattr(args, name, getattr(args, alias))


def _resolve_pairs(candidate: Any, given: Container[str]) -> None:
    """Let what a trial gives decide over the other name of the same thing, which the arguments were made with."""
    _follow_aliases(candidate, given)
    if "warmup_ratio" not in given:
        # It has been turned into warmup_steps when the arguments were made.
        candidate.warmup_ratio = None
    if "metric_for_best_model" in given and "greater_is_better" not in given:
        candidate.greater_is_better = None


def differs(new: Any, old: Any) -> bool:
    """Whether an argument has another value than before."""
    if new is old:
        return False
    try:
        return bool(new != old)
    except Exception:
        # Objects of other libraries, arrays among them.
        return True


# ---- Values ----------------------------------------------------------------------------------------------------------


def converted(args: Any, name: str, value: Any) -> Any:
    """A value as the declared type of an argument has it.

    Parameters:
        args: the arguments; where nothing is declared, the type of the value they have counts.

    Raises:
        SearchMistake: there is no value of that type for it.
    """
    old = getattr(args, name, None)
    kinds = _kinds(args.__class__).get(name) or (() if old is None else (type(old),))
    try:
        return _converted(name, value, kinds, old)
    except (ValueError, TypeError, OverflowError, argparse.ArgumentTypeError) as error:
        expected = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
        raise SearchMistake(f"A trial sets {name}={value!r}, and {name} takes {expected} ({error}).") from error


def _converted(name: str, value: Any, kinds: tuple[Any, ...], old: Any) -> Any:
    if value is None:
        return None
    if name in CHOICE_FIELDS:
        return _choice(CHOICE_FIELDS[name], value)
    if any(type(value) is (typing.get_origin(kind) or kind) for kind in kinds):
        return _as_before(value, old)
    if isinstance(value, str) and str not in kinds:
        return _as_before(_of_text(value, kinds), old)
    if isinstance(value, (bool, int, float)):
        return _as_before(_of_number(value, kinds), old)
    return value


def _choice(choices: type[Enum], value: Any) -> Enum:
    wanted = getattr(value, "value", value)
    try:
        return choices(wanted)
    except ValueError:
        raise ValueError(suggestion(str(wanted), [member.value for member in choices])) from None


def _of_text(text: str, kinds: tuple[Any, ...]) -> Any:
    # In this order, since every whole number is a number too.
    for kind, read in ((bool, truth), (float, float), (int, _whole)):
        if kind in kinds:
            return read(text)
    enumerations = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)]
    return enumerations[0](text) if enumerations else text


def _of_number(number: float, kinds: tuple[Any, ...]) -> Any:
    if float in kinds and not isinstance(number, bool):
        return float(number)
    if int in kinds:
        # 3.7 becomes 3, as in transformers: the default space of Ray Tune draws seeds from all numbers in a range.
        return int(number)
    if bool in kinds:
        return truth(str(int(number)) if number in (0, 1) else str(number))
    return str(number) if str in kinds else number


def _whole(text: str) -> int:
    return int(float(text)) if "." in text or "e" in text.lower() else int(text)


def _as_before(value: Any, old: Any) -> Any:
    # A script that gave a whole number, as in num_train_epochs=3, has whole numbers in its logs and files.
    if type(value) is float and type(old) is int and value.is_integer():
        return int(value)
    return value


def _plain(value: Any) -> Any:
    """A number of NumPy or torch as Python's own; anything else as it is."""
    if not isinstance(value, (str, bool, int, float)) and getattr(value, "shape", None) == ():
        return value.item()
    return value


@cache
def _kinds(cls: type) -> dict[str, tuple[Any, ...]]:
    """Field -> the types that its annotation names, without None; empty where the annotation cannot be read."""
    found: dict[str, tuple[Any, ...]] = {}
    for owner in reversed(cls.__mro__):
        own = [name for name in vars(owner).get("__annotations__", {}) if name in cls.__dataclass_fields__]  # type: ignore[attr-defined]
        try:
            hints = typing.get_type_hints(owner)
        except Exception:
            # Names of a script's function, which cannot be looked up from here.
            found.update(dict.fromkeys(own, ()))
            continue
        found.update({name: tuple(_members(hints[name])) for name in own})
    return found


def _members(hint: Any) -> list[Any]:
    if typing.get_origin(hint) in (Union, types.UnionType):
        return [member for one in typing.get_args(hint) for member in _members(one)]
    return [] if hint in (types.NoneType, Any) else [hint]
