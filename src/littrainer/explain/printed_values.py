"""Values as Python code, and those of which there is none."""

from __future__ import annotations

import json
import math
from typing import Any


def code(value: Any) -> str:
    """A plain value as Python code, text in double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{code(key)}: {code(item)}" for key, item in value.items()) + "}"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def is_plain(value: Any) -> bool:
    """Whether a value has a form as code: numbers, text, truth values, None, and lists, tuples and dicts of them."""
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def plain_part(settings: Any) -> Any:
    """Settings without those that have no form as code; anything but a dict as it is."""
    if not isinstance(settings, dict):
        return settings
    return {name: value for name, value in settings.items() if is_plain(value)}


def objects_in(value: Any) -> list[str]:
    """The entries of settings that have no form as code, as `name: what it is`; none where the value is no dict."""
    if not isinstance(value, dict):
        return []
    return [f"{name}: {described(item)}" for name, item in value.items() if not is_plain(item)]


def described(value: Any) -> str:
    """What an object is, in two words: a function or class by its name, anything else by that of its class."""
    if isinstance(value, type) or (callable(value) and hasattr(value, "__name__")):
        return f"{'class' if isinstance(value, type) else 'function'} {value.__name__}"
    try:
        return f"{type(value).__name__} of {len(value)} entries"
    except (TypeError, NotImplementedError, AttributeError):
        return type(value).__name__
