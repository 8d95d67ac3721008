"""The known name that is spelled most like an unknown one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The member of `known` that is spelled most like `name`; None if nothing is similar."""
    known = list(known)
    matches = get_close_matches(name, known, n=1) or get_close_matches(name.lower(), known, n=1)
    return matches[0] if matches else None


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Half a sentence to follow an unknown name: what it may have meant, or what there is to choose from."""
    known = list(known)
    match = nearest_name(name, known)
    if match is not None:
        return f"did you mean {match!r}?"
    return f"known are {', '.join(known)}" if len(known) <= 10 else "no known name is similar"


def format_accepted_names(name: str, known: Collection[str]) -> str:
    """The end of a sentence that refuses a name: what it may have meant, and all that are taken."""
    match = nearest_name(name, known)
    return f"{'' if match is None else f' (did you mean {match!r}?)'}; it takes {', '.join(known) or 'none'}"


def unrecognized(words: Sequence[str], known: Iterable[str]) -> str:
    """The complaint about unknown words of a command line, with the options that may have been meant."""
    known = list(known)
    names = [word.partition("=")[0] for word in words if word.startswith("-")]
    hints = [f"{name}: did you mean {nearest!r}?" for name in names if (nearest := nearest_name(name, known))]
    return "; ".join([f"unrecognized arguments: {' '.join(words)}", *(hints or ["see --help"])])
