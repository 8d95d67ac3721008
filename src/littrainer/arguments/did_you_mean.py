"""Suggestions of valid names for unknown names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches

SYNONYMS = {
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
}
"""Name in other libraries, which is not similar -> the argument."""


def find_nearest_name(name: str, valid: Iterable[str]) -> str | None:
    valid = list(valid)
    if SYNONYMS.get(name) in valid:
        return SYNONYMS[name]
    matches = get_close_matches(name, valid, n=1) or get_close_matches(name.lower(), valid, n=1)
    return matches[0] if matches else None


def suggest_name(name: str, valid: Iterable[str]) -> str:
    """Return a clause with the nearest valid name, or a few valid names."""
    valid = list(valid)
    match = find_nearest_name(name, valid)
    if match is not None:
        return f"did you mean {match!r}?"
    return f"known are {', '.join(valid)}" if len(valid) <= 10 else "no known name is similar"


def format_accepted_names(name: str, valid: Collection[str]) -> str:
    match = find_nearest_name(name, valid)
    return f"{'' if match is None else f' (did you mean {match!r}?)'}; it takes {', '.join(valid) or 'none'}"


def unrecognized(words: Sequence[str], valid: Iterable[str]) -> str:
    valid = list(valid)
    names = [word.partition("=")[0] for word in words if word.startswith("-")]
    hints = [f"{name}: did you mean {nearest!r}?" for name in names if (nearest := find_nearest_name(name, valid))]
    return "; ".join([f"unrecognized arguments: {' '.join(words)}", *(hints or ["see --help"])])
