"""Finding what it is, deep inside of an object, that cannot be pickled."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

# Objects are followed this deep; what lies deeper is named by what holds it.
DEEPEST = 12


def where_it_fails(
    name: str, state: Mapping[str, Any], dump: Callable[[Any], Any], error: Exception
) -> tuple[str, Any, Exception]:
    """The innermost thing that does not pickle.

    Parameters:
        name: what the outermost object is called.
        state: its attributes.
        dump: pickles a value, or raises.
        error: what pickling the whole has raised.

    Returns:
        where the thing is (`trainer.compute_metrics, its global lock`), the thing, and the error of pickling it.
    """
    for attribute, value in state.items():
        failure = _failure(dump, value)
        if failure is not None:
            return _innermost(f"{name}.{attribute}", value, dump, failure, {id(value)})
    return name, state, error


def _innermost(
    path: str, value: Any, dump: Callable[[Any], Any], failure: Exception, seen: set[int]
) -> tuple[str, Any, Exception]:
    if len(seen) < DEEPEST:
        for label, part in _parts(value):
            if id(part) in seen:
                continue
            inner = _failure(dump, part)
            if inner is not None:
                return _innermost(f"{path}{label}", part, dump, inner, {*seen, id(part)})
    return path, value, failure


def _failure(dump: Callable[[Any], Any], value: Any) -> Exception | None:
    try:
        dump(value)
    except Exception as error:
        return error
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value holds, each with how it is reached."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
        yield "", value.__func__
    elif isinstance(value, FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, type):
        yield from ((f".{name}", part) for name, part in vars(value).items() if not _is_of_python(name))
    elif not isinstance(value, ModuleType):
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())
        if any(isinstance(part, FunctionType) for part in vars(type(value)).values()):
            yield f", its class {type(value).__name__}", type(value)


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    try:
        variables = inspect.getclosurevars(function)
    except (TypeError, ValueError):
        return
    yield from ((f", its variable {name}", part) for name, part in variables.nonlocals.items())
    yield from ((f", its global {name}", part) for name, part in variables.globals.items())
    for name, default in (function.__kwdefaults__ or {}).items():
        yield f", its default of {name}", default
    yield from ((f", its default {index}", part) for index, part in enumerate(function.__defaults__ or ()))


def _is_of_python(name: str) -> bool:
    return name.startswith("__") and name.endswith("__") and name not in ("__init__", "__call__", "__getitem__")
