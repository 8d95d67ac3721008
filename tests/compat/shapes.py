"""Interfaces of names: parameters of functions and methods, members of enumerations, constants."""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any


def shape_of(value: Any) -> dict[str, Any]:
    """Return the parameters, members and methods of a class, function or constant."""
    if isinstance(value, type) and issubclass(value, Enum):
        return {"choices": {member.name: member.value for member in value}}
    if isinstance(value, type):
        return {"parameters": parameters_of(value), "methods": methods_of(value)}
    if callable(value):
        return {"parameters": parameters_of(value)}
    return {"constant": value if isinstance(value, str | int | float) else type(value).__name__}


def parameters_of(function: Any) -> list[str]:
    """Return the names of parameters in order, with `*` and `**` of variadic parameters."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    mark = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [mark.get(parameter.kind, "") + parameter.name for parameter in parameters if parameter.name != "self"]


def methods_of(cls: type) -> dict[str, list[str] | None]:
    """Return public members that transformers or the class's package defines -> parameters; None for attributes."""
    packages = {cls.__module__.partition(".")[0], "transformers"}
    members: dict[str, list[str] | None] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.partition(".")[0] in packages:
            for name in vars(base):
                if not name.startswith("_"):
                    value = getattr(cls, name, None)
                    members[name] = parameters_of(value) if callable(value) else None
    return members
