"""Construction that refuses unknown argument names, all of them in one message."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
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
            parameters = inspect.signature(cls.__init__).parameters
            takes_any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
            unknown = [name for name in kwargs if name not in parameters and name not in EARLIER_NAMES]
            if unknown and not takes_any_name:
                raise TypeError(unknown_names_message(cls.__name__, unknown, list(parameters)[1:]))
        return super().__new__(cls)


def unknown_names_message(class_name: str, unknown: Iterable[str], known: Iterable[str]) -> str:
    """One sentence that lists each unknown name with the name it probably stands for."""
    known = list(known)
    found = [f"{name!r} is unknown, {suggestion(name, known)}" for name in unknown]
    return f"{class_name}: {'; '.join(found)}"
