"""The known name that somebody most likely meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The member of `known` most like `name`, or None where nothing is similar."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return matches[0] if matches else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """Half a sentence to follow an unknown name: what it may have meant, or what there is to choose from."""
    known = list(known)
    match = nearest_name(name, known)
    if match is not None:
        return f"did you mean {match!r}?"
    if len(known) <= 10:
        return f"known are {', '.join(known)}"
    return "no known name is similar"
