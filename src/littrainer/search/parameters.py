"""The parameters of a trial: default spaces, and assignment to training arguments."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import logging
from collections.abc import Callable, Container, Mapping
from functools import cache
from typing import Any

from littrainer.arguments.did_you_mean import suggest_name
from littrainer.arguments.earlier_names import earlier_names_of
from littrainer.arguments.json_values import truth
from littrainer.arguments.normalization import ALIASES
from littrainer.arguments.training_arguments import TrainingArguments
from littrainer.distributed.collectives import PeerFailedError, PeerLostError
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.runtime.notes import kind_of

logger = logging.getLogger(__name__)

MIN_LEARNING_RATE, MAX_LEARNING_RATE = 1e-6, 1e-4
MAX_EPOCHS = 5
MAX_SEED = 40
MICRO_BATCH_SIZES = [4, 8, 16, 32, 64]
# Ray's logger is configured by this entry.
IGNORED_CONFIG_KEYS = ("wandb",)


class SearchMistake(TypeError):
    """The script's space, objective or model is wrong for all trials, which ends the search."""


def default_hp_space_optuna(trial: Any) -> dict[str, Any]:
    """Draw the hyperparameters of a search without `hp_space`."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", MIN_LEARNING_RATE, MAX_LEARNING_RATE, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, MAX_EPOCHS),
        "seed": trial.suggest_int("seed", 1, MAX_SEED),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", MICRO_BATCH_SIZES),
    }


def default_hp_space_ray(trial: Any) -> dict[str, Any]:
    tune: Any = importlib.import_module("ray.tune")
    return {
        "learning_rate": tune.loguniform(MIN_LEARNING_RATE, MAX_LEARNING_RATE),
        "num_train_epochs": tune.choice(list(range(1, MAX_EPOCHS + 1))),
        "seed": tune.uniform(1, MAX_SEED),
        "per_device_train_batch_size": tune.choice(MICRO_BATCH_SIZES),
    }


def default_hp_space_wandb(trial: Any) -> dict[str, Any]:
    parameters = {
        "learning_rate": {"distribution": "uniform", "min": MIN_LEARNING_RATE, "max": MAX_LEARNING_RATE},
        # As in transformers, higher by 1 than for the other libraries.
        "num_train_epochs": {"distribution": "int_uniform", "min": 1, "max": MAX_EPOCHS + 1},
        "seed": {"distribution": "int_uniform", "min": 1, "max": MAX_SEED},
        "per_device_train_batch_size": {"values": MICRO_BATCH_SIZES},
    }
    return {"method": "random", "metric": {"name": "objective", "goal": "minimize"}, "parameters": parameters}


def call_space(space: Callable[[Any], Any], trial: Any) -> dict[str, Any]:
    """Call a space function; raise a SearchMistake if it fails or returns another type than a dict."""
    try:
        parameters = space(trial)
    except Exception as error:
        if is_a(error, "pruned trial") or isinstance(error, SearchMistake | PeerFailedError | PeerLostError):
            raise
        raise SearchMistake(f"hp_space failed: {type(error).__name__}: {error}") from error
    if not isinstance(parameters, Mapping):
        what = "nothing" if parameters is None else kind_of(parameters)
        raise SearchMistake(
            f"hp_space returned {what}; it has to return a dict of arguments to set by name, such as "
            '{"learning_rate": ...}.'
        )
    return dict(parameters)


def get_drawn_parameters(trial: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in trial.items() if name not in IGNORED_CONFIG_KEYS}


def set_parameters(args: Any, parameters: Mapping[str, Any], refuses_unknown: bool = False) -> set[str]:
    """Set all arguments to the parameters of a trial, or none if any fails; return the names of changed arguments.

    Parameters:
        refuses_unknown: raise for an unknown name, which is skipped with a warning otherwise, as in transformers.

    Raises:
        SearchMistake: a value has the wrong type, or a name is refused.
        ValueError, NotImplementedError: a value is out of range, contradicts another or is not supported.
    """
    candidate = copy.copy(args)
    earlier = earlier_names_of(type(args), parameters)
    for name, drawn in parameters.items():
        value = drawn.item() if getattr(drawn, "shape", None) == () else drawn
        if name in earlier:
            setattr(candidate, name, value)
        elif hasattr(args, name):
            setattr(candidate, name, convert_parameter(args, name, value))
        else:
            message = _describe_unknown(name, args.__class__)
            if refuses_unknown:
                raise SearchMistake(f"{message} Let model_init take the trial if the model needs it.")
            _warn_of_unknown(message)
    resolve_arguments(candidate, parameters)
    changed = {name for name, value in vars(candidate).items() if has_changed(value, vars(args).get(name))}
    vars(args).update(vars(candidate))
    return changed


def convert_parameter(args: Any, name: str, value: Any) -> Any:
    """Return a value with the type of the argument's current value, as in transformers.

    However, 0.1 is not converted if the script wrote `weight_decay=0`, and "False" is false.
    """
    old = getattr(args, name)
    if old is None or value is None:
        return value
    default = getattr(type(args), name, None)
    if type(old) is int and isinstance(default, float) and isinstance(value, float) and not value.is_integer():
        return value
    try:
        return truth(value) if isinstance(old, bool) and isinstance(value, str) else type(old)(value)
    except Exception as error:
        raise SearchMistake(
            f"A trial sets {name}={value!r}, and {name} takes {type(old).__name__} ({error})."
        ) from error


def _describe_unknown(name: str, cls: Any) -> str:
    names = [field.name for field in dataclasses.fields(cls) if not field.name.startswith("_")]
    suggestion = suggest_name(name, names)
    end = "" if suggestion.endswith("?") else "."
    return f"A trial sets {name}, which {cls.__name__} does not have, {suggestion}{end}"


@cache
def _warn_of_unknown(message: str) -> None:
    logger.warning(f"{message} It counts only if model_init takes the trial and reads it.")


def resolve_arguments(args: Any, changed: Container[str]) -> None:
    """Copy changed aliases to their arguments, and apply the rules of the constructor."""
    for alias, name in ALIASES.items():
        if alias in changed and name not in changed:
            setattr(args, name, getattr(args, alias))
    if "warmup_ratio" not in changed:
        # The constructor has converted it to warmup_steps.
        args.warmup_ratio = None
    if "metric_for_best_model" in changed and "greater_is_better" not in changed:
        args.greater_is_better = None
    if isinstance(args, TrainingArguments):
        wants_bars = args._asked_for_bars
        # A subclass's constructor may only run once.
        try:
            TrainingArguments.__post_init__(args)
        except TypeError as error:
            raise SearchMistake(f"A trial sets an argument to a value of another type: {error}") from error
        args._asked_for_bars = wants_bars


def has_changed(new: Any, old: Any) -> bool:
    try:
        return new is not old and bool(new != old)
    except Exception:
        # Such as arrays.
        return True
