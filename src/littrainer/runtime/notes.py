"""Explanations that are added to an error without changing its type or its arguments, and words for them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

logger = logging.getLogger(__name__)

# Attribute of an error: the part of a training that it ended.
PART = "_littrainer_part"
EVALUATION, SAVE, END = "evaluation", "save", "end of training"


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


@contextmanager
def part_of_training(part: str) -> Iterator[None]:
    """A block that is a part of a training, noted in an error that ends it; of nested parts the outermost counts."""
    try:
        yield
    except BaseException as error:
        with suppress(AttributeError):
            setattr(error, PART, part)
        raise


def kind_of(value: Any) -> str:
    """The type of a value with its article: "a list", "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def listed(items: Iterable[Any], most: int = 20) -> str:
    """Items in one line, with how many more there are than are named."""
    texts = [str(item) for item in items]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")
