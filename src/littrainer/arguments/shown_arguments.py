"""Arguments as short texts without secrets, and their difference from the defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from littrainer.arguments.fields import ArgumentFields, GenerationFields
from littrainer.arguments.normalization import normalize
from littrainer.arguments.secrets import redact_secrets

MAX_TEXT_LETTERS = 300
NOTHING = frozenset({"None", "[]", "{}", ""})


def format_defaults() -> dict[str, str]:
    """Return the default of each argument as text, in documented order."""
    args = ArgumentFields()
    normalize(args, ())
    generation = {field.name: field.default for field in dataclasses.fields(GenerationFields)}
    return {name: format_value(value) for name, value in {**vars(args), **generation, "output_dir": None}.items()}


def select_non_defaults(texts: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """Select the texts that differ from the defaults, a subclass's names last."""
    names = [*(name for name in defaults if name in texts), *(name for name in texts if name not in defaults)]
    return {name: texts[name] for name in names if name not in defaults or not is_same(texts[name], defaults[name])}


def is_same(first: str, second: str) -> bool:
    if first == second or {first, second} <= NOTHING:
        return True
    try:
        return float(first) == float(second)
    except ValueError:
        return False


def format_value(value: Any) -> str:
    """Return a value as a short line, without a configuration's unset entries."""
    text = " ".join(_text(redact_secrets(value), is_nested=False).split())
    return text if len(text) <= MAX_TEXT_LETTERS else f"{text[: MAX_TEXT_LETTERS - 3]}..."


def _text(value: Any, is_nested: bool) -> str:
    if hasattr(value, "to_dict"):
        value = redact_secrets(value.to_dict())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        # `str` would show secrets.
        value = redact_secrets({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, dict):
        shown = {name: entry for name, entry in value.items() if entry is not None and entry is not False}
        return "{" + ", ".join(f"{name}: {_text(entry, True)}" for name, entry in shown.items()) + "}"
    if isinstance(value, list | tuple | set | frozenset):
        return f"[{', '.join(_text(item, True) for item in value)}]"
    if hasattr(value, "value"):
        return str(value.value)
    return repr(value) if is_nested else str(value)
