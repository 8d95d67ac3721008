"""Notes on errors, which keep their type and arguments, and texts for messages."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

logger = logging.getLogger(__name__)

# Attribute of an error for the part of a training in which it was raised.
PART = "_littrainer_part"
EVALUATION, SAVE, END = "evaluation", "save", "end of training"


def add_note(error: BaseException, note: str) -> None:
    """Add a note, unless the error has it."""
    notes = getattr(error, "__notes__", [])
    if note in notes:
        return
    if hasattr(error, "add_note"):
        error.add_note(note)
        return
    # Python 3.10 does not print notes.
    setattr(error, "__notes__", [*notes, note])  # noqa: B010
    logger.error(note)


@contextmanager
def part_of_training(part: str) -> Iterator[None]:
    """Run a part of a training, and record it in errors; the outermost part wins."""
    try:
        yield
    except BaseException as error:
        with suppress(AttributeError):
            setattr(error, PART, part)
        raise


def kind_of(value: Any) -> str:
    """Return the type of a value with its article: "a list", "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def listed(items: Iterable[Any], most: int = 20) -> str:
    """Return up to `most` items in a line, and the number of others."""
    texts = [str(item) for item in items]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")
