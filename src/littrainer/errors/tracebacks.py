"""Tracebacks without the calls between a Trainer's method and the code that an error came from.

What stays: the public method that was called, each frame of the script and of other libraries, and before each of these
the last call of ours, which shows what it was called for. The error itself stays the object that was raised.

One that a check of ours raises has a message that says what there is to say: it ends at the public method. A fault of
littrainer or Lightning, which may be due to an object of the script, keeps that package's calls that led to it.
"""

from __future__ import annotations

import dis
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from types import TracebackType

from littrainer.errors.lazy_isinstance import package_of
from littrainer.errors.log_levels import tells_everything

# Set to "full", it leaves tracebacks as they are; so does log_level="debug".
SWITCH, FULL = "LITTRAINER_TRACEBACK", "full"
INTERNAL = frozenset({"littrainer", "lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning"})
# What may stand between two calls of the former: decorators and contexts, the wrapper of an optimizer's step.
CARRYING = frozenset({"torch", "contextlib", "functools"})
# Where the handlers of Ctrl-C are.
ANSWERING = "littrainer.errors.interruptions"


def shows_everything() -> bool:
    """Whether tracebacks are to be left as they are."""
    return os.environ.get(SWITCH) == FULL or tells_everything()


class _Nesting(threading.local):
    depth = 0


_nesting = _Nesting()


class ShortTraceback(AbstractContextManager[None]):
    """An error that leaves it has a traceback without internal calls, below the frame that holds the `with`.

    One within another leaves tracebacks alone: on the way out they are still looked at, for what goes into notes.
    """

    def __enter__(self) -> None:
        _nesting.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, raised_in: TracebackType | None
    ) -> None:
        _nesting.depth -= 1
        if error is None or raised_in is None or _nesting.depth:
            return
        if shows_everything():
            return
        # Whatever goes wrong here, as in an error's own attributes, must not replace the error.
        with suppress(Exception):
            for one in error_and_reasons(error):
                # The first entry is the method that was called; for a reason, what caught it.
                trace = raised_in if one is error else one.__traceback__
                if trace is not None:
                    _link([trace, *_telling(_entries(trace)[1:], one)])


def error_and_reasons(error: BaseException) -> Iterator[BaseException]:
    """The error, what it came from and during, and the errors in a group."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [one.__cause__, one.__context__]
        if type(one).__name__ in ("ExceptionGroup", "BaseExceptionGroup"):
            # Python 3.10 has none.
            waiting += one.exceptions  # type: ignore[attr-defined]


def _entries(trace: TracebackType | None) -> list[TracebackType]:
    found = []
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def _telling(entries: list[TracebackType], error: BaseException) -> list[TracebackType]:
    # Ctrl-C is answered wherever the program is, by handlers of ours that say nothing about it.
    if isinstance(error, KeyboardInterrupt):
        while entries and entries[-1].tb_frame.f_globals.get("__name__") == ANSWERING:
            entries = entries[:-1]
    packages = [package_of(entry.tb_frame) for entry in entries]
    # Ctrl-C and sys.exit() end a program wherever it is.
    ends_in_internal = bool(packages) and packages[-1] in INTERNAL and isinstance(error, Exception)
    is_on_purpose = ends_in_internal and _is_raised_on_purpose(entries[-1], error)
    # A function of the script that cannot be called as it is called, and so has no entry, is named in a note.
    if ends_in_internal and not is_on_purpose and not getattr(error, "__notes__", None):
        own = (INTERNAL | CARRYING) - {packages[-1]}
        return [entry for entry, package in zip(entries, packages, strict=True) if package not in own]
    stay: list[TracebackType] = []
    # From the innermost call outwards: what lies right below the current entry, leaving out what only carries calls on.
    leads_to_internal = is_on_purpose and packages[-1] == "littrainer"
    for entry, package in zip(reversed(entries), reversed(packages), strict=True):
        is_internal = package in INTERNAL or package in CARRYING
        if not (is_internal and leads_to_internal):
            stay.append(entry)
        leads_to_internal = is_internal and (leads_to_internal or package in INTERNAL)
    return stay[::-1]


def _is_raised_on_purpose(entry: TracebackType, error: BaseException) -> bool:
    """Whether an error comes out of a `raise`, and not out of an operation that failed."""
    operation = dis.opname[entry.tb_frame.f_code.co_code[entry.tb_lasti]]
    return operation == "RAISE_VARARGS" and not isinstance(error, AssertionError)


def _link(entries: list[TracebackType]) -> None:
    for entry, following in zip(entries, [*entries[1:], None], strict=True):
        entry.tb_next = following
