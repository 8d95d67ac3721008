"""The way in which errors are shown: tracebacks without internal calls, and the only `sys.excepthook` of littrainer."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr, suppress
from types import TracebackType

from littrainer.runtime.log_levels import is_debug_logging_enabled

# Set to "full", it leaves tracebacks as they are; so does log_level="debug".
SWITCH, FULL = "LITTRAINER_TRACEBACK", "full"
INTERNAL_PACKAGES = frozenset(
    {"littrainer", "lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning"}
)
# Decorators and contexts between two internal calls, such as the wrapper of an optimizer's step.
WRAPPING_PACKAGES = frozenset({"torch", "contextlib", "functools"})
# Attribute of a KeyboardInterrupt: the lines to print, none in all processes but the first.
LINES = "_littrainer_lines"
_reports: list[Callable[[BaseException], None]] = []
# The error that a hook of ours handles at the moment.
_handled: BaseException | None = None


def should_show_full_tracebacks() -> bool:
    """Return whether tracebacks must be left as they are."""
    return os.environ.get(SWITCH) == FULL or is_debug_logging_enabled()


class ShortTraceback(AbstractContextManager[None]):
    """An error that leaves it has a traceback without internal calls, below the frame that holds the `with`.

    The last internal call stays: it called the code that failed, or raised the error.
    """

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, raised_in: TracebackType | None
    ) -> None:
        if error is None or raised_in is None or should_show_full_tracebacks():
            return
        # A fault here, as in an error's own attributes, must not replace the error.
        with suppress(Exception):
            for link in error_and_reasons(error):
                _shorten(raised_in if link is error else link.__traceback__)


def error_and_reasons(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its causes and contexts, and the errors in a group."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting += [link.__cause__, link.__context__]
        # Python 3.10 has no groups.
        if type(link).__name__ in ("ExceptionGroup", "BaseExceptionGroup"):
            waiting += link.exceptions  # type: ignore[attr-defined]


def _shorten(trace: TracebackType | None) -> None:
    entries: list[TracebackType] = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    packages = [str(entry.tb_frame.f_globals.get("__name__")).partition(".")[0] for entry in entries]
    last = max((place for place, package in enumerate(packages) if package in INTERNAL_PACKAGES), default=0)
    hidden = INTERNAL_PACKAGES | WRAPPING_PACKAGES
    between = [entry for entry, package in zip(entries[:last], packages, strict=False) if package not in hidden]
    # The first entry is the method that was called; for a reason, the function that caught it.
    kept = list(dict.fromkeys([*entries[:1], *between, *entries[last:]]))
    for entry, following in zip(kept, [*kept[1:], None], strict=True):
        entry.tb_next = following


# ---- The error that ends the program ---------------------------------------------------------------------------------


def report_uncaught(report: Callable[[BaseException], None]) -> None:
    """Call a function with the error that ends the program, before the error is printed."""
    if report not in _reports:
        _reports.append(report)
    _install()


def print_instead(error: KeyboardInterrupt, lines: Sequence[str]) -> None:
    """Print lines instead of the traceback, if an interruption ends the program."""
    setattr(error, LINES, lines)
    _install()


def _install() -> None:
    earlier_hook = sys.excepthook
    if getattr(earlier_hook, "__module__", None) == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _handled
        if _handled is error:
            # A tracker has put its own hook between this one and a later one of ours.
            earlier_hook(kind, error, trace)
            return
        _handled = error
        interruptions = list(_interruptions(error))
        lines = next((getattr(link, LINES) for link in interruptions if hasattr(link, LINES)), None)
        if lines is not None and not sys.flags.inspect:
            # Nothing is left to be saved: another Ctrl-C ends the program at once.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            for report in _reports:
                # The error that ends the program is shown in any case.
                with suppress(Exception):
                    report(error)
            # Other hooks notify trackers; the traceback at their end is shown only if a step failed too.
            is_shown = lines is None or any(link.__cause__ is not None for link in interruptions)
            with nullcontext() if is_shown else redirect_stderr(io.StringIO()):
                earlier_hook(kind, error, trace)
        finally:
            _handled = None
            print(*(lines or ()), sep="\n", end="\n" if lines else "", file=sys.stderr, flush=True)

    sys.excepthook = hook


def _interruptions(error: BaseException | None) -> Iterator[KeyboardInterrupt]:
    # Another Ctrl-C may have come while the first one ended the training.
    while isinstance(error, KeyboardInterrupt):
        yield error
        error = error.__context__
