"""Conversion of text to dicts, numbers and booleans."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from littrainer.distributed.environment import FALSE_VALUES, TRUE_VALUES


def truth(value: Any) -> bool:
    text = str(value).strip().lower()
    if value is None or text not in (*TRUE_VALUES, *FALSE_VALUES):
        raise ValueError("give true or false")
    return text in TRUE_VALUES


def convert_nested_text(value: Any) -> Any:
    """Convert nested strings that spell a boolean or a non-negative number."""
    if isinstance(value, dict):
        return {key: convert_nested_text(item) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if value.isdecimal():
        return int(value)
    if value.replace(".", "", 1).isdecimal():
        return float(value)
    return value


def parse_json_object(text: str, source: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{source} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno} of {_cut(text)!r}."
        ) from None
    if not isinstance(parsed, dict):
        raise ValueError(f'{source} must be a JSON object such as {{"key": 1}}, got {_cut(text)!r}.')
    return parsed


def read_json_object(path: str | os.PathLike[str], source: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"{source} cannot be read: {reason}. Give a dict, JSON text or the path of a file.") from None
    return parse_json_object(text, source)


def read_mapping(value: Any, source: str) -> dict[str, Any]:
    """Return a new dict from a mapping, JSON text or the path of a JSON file."""
    if isinstance(value, Mapping):
        return copy.deepcopy(dict(value))
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{source}={value!r} is not usable; give a dict, or the path of a JSON file.")
    text = os.fspath(value)
    if text.lstrip().startswith("{"):
        return parse_json_object(text, source)
    return read_json_object(text, f"{source}={text!r}")


def _cut(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[:limit] + "..."
