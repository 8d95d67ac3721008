"""What a name means to those who call it: parameters of functions and methods, members of choices, constants."""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any


def shape_of(value: Any) -> dict[str, Any]:
    """Parameters, members and public methods of a class, a function or a constant."""
    if isinstance(value, type) and issubclass(value, Enum):
        return {"choices": {member.name: member.value for member in value}}
    if isinstance(value, type):
        return {"parameters": parameters_of(value), "methods": methods_of(value)}
    if callable(value):
        return {"parameters": parameters_of(value)}
    return {"constant": value if isinstance(value, str | int | float) else type(value).__name__}


def parameters_of(function: Any) -> list[str]:
    """Names of the parameters in their order, `*name` and `**name` where they collect."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    mark = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [mark.get(parameter.kind, "") + parameter.name for parameter in parameters if parameter.name != "self"]


def methods_of(cls: type) -> dict[str, list[str] | None]:
    """Public members that transformers or the class's package defines: parameters of methods, None for others."""
    packages = {cls.__module__.partition(".")[0], "transformers"}
    found: dict[str, list[str] | None] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.partition(".")[0] in packages:
            for name in vars(base):
                if not name.startswith("_"):
                    value = getattr(cls, name, None)
                    found[name] = parameters_of(value) if callable(value) else None
    return found
