"""Explanations that are added to an error without changing its type or its arguments, and words for them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

logger = logging.getLogger(__name__)


def add_note(error: BaseException, note: str) -> None:
    """Add a note, which a traceback shows below the error; what it has already is not added again."""
    noted: Any = error
    notes = getattr(error, "__notes__", [])
    if note in notes:
        return
    if hasattr(error, "add_note"):
        error.add_note(note)
        return
    # Python 3.10 knows no notes and prints none.
    noted.__notes__ = [*notes, note]
    logger.error(note)


def kind_of(value: Any) -> str:
    """The type of a value with its article: "a list", "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def listed(items: Iterable[Any], most: int = 20) -> str:
    """Items in one line, with how many more there are than are named."""
    texts = [str(item) for item in items]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")
