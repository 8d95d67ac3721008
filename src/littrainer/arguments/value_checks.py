"""The value of each argument by itself: its type, from the annotation, and its range, from a table.

Numbers of other libraries (NumPy's, a sweep's 100.0 where 100 is meant) become Python's own.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import types
import typing
from collections.abc import Iterable
from enum import Enum
from functools import cache
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union

from littrainer.arguments.fields import topics_of
from littrainer.arguments.fields_additional import ANNOUNCING_SIGNALS
from littrainer.arguments.fields_distributed import PROCESS_GROUP_BACKENDS
from littrainer.arguments.nearest import suggestion
from littrainer.arguments.normalization import CHOICE_FIELDS

LARGEST_WHOLE_NUMBER = 2**63 - 1


class Range(NamedTuple):
    """The values a number may have.

    Parameters:
        low, high: the bounds, allowed themselves.
        below: an upper bound that is not allowed itself.
        infinite: whether infinity is allowed.
    """

    low: float = -math.inf
    high: float = math.inf
    below: float = math.inf
    infinite: bool = False

    def holds(self, value: float) -> bool:
        """Whether a number that is not nan lies in the range."""
        if math.isinf(value) and not self.infinite:
            return False
        return self.low <= value <= self.high and (value < self.below or self.infinite)

    def __str__(self) -> str:
        if self.low == -math.inf:
            return ""
        if self.below < math.inf:
            return f" from {self.low:g} to below {self.below:g}"
        return f" from {self.low:g} up" if self.high == math.inf else f" from {self.low:g} to {self.high:.10g}"


FROM_0 = Range(low=0)
FROM_1 = Range(low=1)
SHARE = Range(low=0, high=1)

# Numbers that are not listed may have any finite value.
RANGES: dict[str, Range] = {
    "per_device_train_batch_size": FROM_1,
    "per_device_eval_batch_size": FROM_1,
    "num_train_epochs": FROM_0,
    # Both -1 and 0 leave the length to num_train_epochs.
    "max_steps": Range(low=-1),
    "learning_rate": FROM_0,
    "warmup_steps": FROM_0,
    "warmup_ratio": SHARE,
    "weight_decay": FROM_0,
    "adam_beta1": Range(low=0, below=1),
    "adam_beta2": Range(low=0, below=1),
    "adam_epsilon": FROM_0,
    "gradient_accumulation_steps": FROM_1,
    # Scripts switch clipping off with 0, a negative number or infinity.
    "max_grad_norm": Range(infinite=True),
    "label_smoothing_factor": SHARE,
    "neftune_noise_alpha": FROM_0,
    "torch_empty_cache_steps": FROM_1,
    "logging_steps": FROM_0,
    "eval_steps": FROM_0,
    "eval_delay": FROM_0,
    "eval_accumulation_steps": FROM_1,
    # Scripts switch saving off with save_steps=-1, and the limit with save_total_limit=-1.
    "save_steps": Range(low=-1),
    "save_total_limit": Range(low=-1),
    # What NumPy and torch take as seeds.
    "seed": Range(low=0, high=2**32 - 1),
    "data_seed": FROM_0,
    "dataloader_num_workers": FROM_0,
    "dataloader_prefetch_factor": FROM_1,
    "ddp_bucket_cap_mb": FROM_1,
    # What a timedelta holds.
    "ddp_timeout": Range(low=1, high=86_400 * 10**9 - 1),
    "local_rank": Range(low=-1),
    "generation_max_length": FROM_1,
    "generation_num_beams": FROM_1,
}

# Values besides those that the annotations name, which are kept as command-line parsers need them.
ALSO_TAKEN: dict[str, tuple[Any, ...]] = {
    "output_dir": (os.PathLike, None),
    "logging_dir": (os.PathLike,),
    "resume_from_checkpoint": (os.PathLike, bool),
    "dataloader_multiprocessing_context": (BaseContext,),
    "include_for_metrics": (str,),
    "debug": (None,),
    "fsdp": (bool, list),
    "fsdp_config": (os.PathLike,),
    "deepspeed": (os.PathLike,),
}

# Fields whose value is checked where it is read, since it may be an object of another library.
CHECKED_ELSEWHERE = ("accelerator_config", "parallelism_config", "report_to", *CHOICE_FIELDS)

# What a field names, one or several, has to be among these.
TEXT_CHOICES: dict[str, tuple[str, ...]] = {
    "include_for_metrics": ("inputs", "loss"),
    "include_num_input_tokens_seen": ("all", "non_padding", "no"),
    "ddp_backend": PROCESS_GROUP_BACKENDS,
    "jit_checkpoint_signals": ANNOUNCING_SIGNALS,
}


def check_values(args: Any) -> None:
    """Refuse each value whose type or range cannot be right, before anything is computed from it.

    Parameters:
        args: arguments as a script gave them, or normalized ones; numbers are replaced by Python's own.

    Raises:
        TypeError, ValueError: names the argument, its value and what to give instead.
    """
    for name, taken in _taken(args.__class__).items():
        value = getattr(args, name)
        # A subclass may give a field a default of its own type, which it then knows how to read.
        if name in CHECKED_ELSEWHERE or value is getattr(type(args), name, dataclasses.MISSING):
            continue
        plain = _plain_number(value, taken)
        if not _is_taken(plain, taken):
            error = ValueError if isinstance(plain, float) and int in taken else TypeError
            raise error(f"{_named(name, value)} is {_kind(value)}; give {_expected(name, taken)}.{_hint(value)}")
        _check_range(name, plain, taken)
        _check_text(name, plain)
        if plain is not value:
            setattr(args, name, plain)


def _check_range(name: str, value: Any, taken: tuple[Any, ...]) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    too_large = isinstance(value, int) and abs(value) > LARGEST_WHOLE_NUMBER
    if too_large or math.isnan(value) or not RANGES.get(name, Range()).holds(value):
        raise ValueError(f"{_named(name, value)} is out of range; give {_expected(name, taken)}.")


def _check_text(name: str, value: Any) -> None:
    if name in ("output_dir", "logging_dir") and value is not None:
        text = os.fspath(value)
        if not text or "\0" in text:
            raise ValueError(f"{_named(name, value)} is no path; give the path of a folder.")
    valid = TEXT_CHOICES.get(name)
    if valid is None:
        return
    for single in [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []:
        if single not in valid:
            raise ValueError(
                f"{_named(name, single)} is not valid ({suggestion(single, valid)}); choose from {', '.join(valid)}."
            )


@cache
def _taken(cls: type) -> dict[str, tuple[Any, ...]]:
    """Documented field of a class -> the types, values and annotations of list items that it takes."""
    taken: dict[str, tuple[Any, ...]] = {}
    for topic in topics_of(cls):
        hints = typing.get_type_hints(topic)
        taken.update({name: (*_members(hint), *ALSO_TAKEN.get(name, ())) for name, hint in hints.items()})
        for field in dataclasses.fields(topic):
            if bool in taken[field.name] and field.default is False:
                # Unset, which reads as false.
                taken[field.name] += (None,)
    return taken


def _members(hint: Any) -> Iterable[Any]:
    if typing.get_origin(hint) in (Union, types.UnionType):
        for member in typing.get_args(hint):
            yield from _members(member)
    elif typing.get_origin(hint) is Literal:
        yield from typing.get_args(hint)
    else:
        yield None if hint is types.NoneType else hint


def _plain_number(value: Any, taken: tuple[Any, ...]) -> Any:
    """The Python number that another library's number, or 0 and 1 for a boolean, stand for; else the value itself."""
    if isinstance(value, bool):
        return value
    if bool in taken and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    if not isinstance(value, numbers.Real):
        return value
    if isinstance(value, numbers.Integral):
        whole = int(value)
        return bool(whole) if bool in taken and int not in taken and whole in (0, 1) else whole
    real = float(value)
    if int in taken and float not in taken and real.is_integer():
        return int(real)
    return real


def _is_taken(value: Any, taken: tuple[Any, ...]) -> bool:
    return any(_is_one(value, member) for member in taken)


def _is_one(value: Any, member: Any) -> bool:
    if member is Any:
        return True
    if member is None or isinstance(member, bool):
        return value is member
    if member in (int, float):
        return isinstance(value, int | member) and not isinstance(value, bool)
    origin = typing.get_origin(member) or member
    if origin is list:
        items = typing.get_args(member)
        return isinstance(value, list | tuple) and all(not items or _is_item(item, items[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    return isinstance(value, origin)


def _is_item(item: Any, kind: type) -> bool:
    return isinstance(item, str if issubclass(kind, Enum) else kind)


def _expected(name: str, taken: tuple[Any, ...]) -> str:
    return " or ".join(dict.fromkeys(text for member in taken if (text := _described(name, member))))


def _described(name: str, member: Any) -> str:
    allowed = str(RANGES.get(name, ""))
    if member is None:
        return "None"
    if isinstance(member, bool):
        return str(member).lower()
    words = {
        bool: "true or false",
        int: f"a whole number{allowed}",
        float: f"a number{allowed}",
        str: "text" if name not in TEXT_CHOICES else f"one of {', '.join(TEXT_CHOICES[name])}",
        os.PathLike: "a path",
        Path: "a path",
        BaseContext: "a multiprocessing context",
    }
    origin = typing.get_origin(member) or member
    if origin is list:
        return "a list of texts"
    if origin is dict:
        return "a dict with texts as keys"
    return words.get(origin, getattr(origin, "__name__", str(origin)))


def _named(name: str, value: Any) -> str:
    if name.endswith("_token"):
        return name
    text = repr(value) if isinstance(value, str | numbers.Number | list | dict | tuple | None) else "..."
    text = " ".join(text.split())
    return f"{name}={text if len(text) <= 60 else text[:60] + '...'}"


def _kind(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, str):
        return "text"
    if isinstance(value, bool):
        return "a truth value"
    if isinstance(value, float):
        return "a fraction" if math.isfinite(value) else "not finite"
    return (
        f"a {type(value).__name__} that does not fit" if isinstance(value, list | dict) else f"a {type(value).__name__}"
    )


def _hint(value: Any) -> str:
    if not isinstance(value, str):
        return ""
    try:
        float(value)
    except ValueError:
        return ""
    return " Write the number without quotes; YAML takes 5e-5 for text and 5.0e-5 for a number."
