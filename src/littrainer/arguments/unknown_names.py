"""Construction that refuses unknown argument names, all of them in one message."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from littrainer.arguments.earlier_names import EARLIER_NAMES
from littrainer.arguments.nearest import suggestion


class RefusesUnknownNames:
    """Base of argument classes: keyword names are checked against the constructor before it runs.

    The check sits in `__new__`, which every subclass inherits whatever constructor it generates or writes, and which
    pickling and copying call without arguments. A constructor that takes `**kwargs` does its own sorting.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            parameters = _parameters_of(cls.__init__)
            unknown = [name for name in kwargs if name not in parameters and name not in EARLIER_NAMES]
            if unknown and not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
                raise TypeError(unknown_names_message(cls.__name__, unknown, list(parameters)[1:]))
        return super().__new__(cls)


@functools.lru_cache(maxsize=16)
def _parameters_of(constructor: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    # With 121 parameters, half of what making arguments costs; a search makes them for each trial.
    return inspect.signature(constructor).parameters


def unknown_names_message(class_name: str, unknown: Iterable[str], known: Iterable[str]) -> str:
    """One sentence that lists each unknown name with the name it probably stands for."""
    known = list(known)
    found = [f"{name!r} is unknown, {suggestion(name, known)}" for name in unknown]
    return f"{class_name}: {'; '.join(found)}"
