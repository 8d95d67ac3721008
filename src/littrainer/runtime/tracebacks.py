"""Tracebacks without internal calls, and the only `sys.excepthook` of littrainer."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr, suppress
from types import TracebackType

from littrainer.runtime.log_levels import is_debug_logging_enabled

# Environment variable for full tracebacks, like log_level="debug".
SWITCH, FULL = "LITTRAINER_TRACEBACK", "full"
INTERNAL_PACKAGES = frozenset(
    {"littrainer", "lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning"}
)
# Packages of decorators and contexts between internal calls.
WRAPPING_PACKAGES = frozenset({"torch", "contextlib", "functools", "optuna", "concurrent"})
# Attribute of a KeyboardInterrupt for the lines to print; empty except in the first process.
LINES = "_littrainer_lines"
_reports: list[Callable[[BaseException], None]] = []
# Error that the hook is handling.
_handled: BaseException | None = None


def should_show_full_tracebacks() -> bool:
    return os.environ.get(SWITCH) == FULL or is_debug_logging_enabled()


class ShortTraceback(AbstractContextManager[None]):
    """A block that removes internal calls from the tracebacks of errors, except the last internal call.

    The last internal call raised the error, or called the code that failed.
    """

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, raised_in: TracebackType | None
    ) -> None:
        if error is not None and raised_in is not None:
            shorten_tracebacks(error, raised_in)


def shorten_tracebacks(error: BaseException, raised_in: TracebackType | None) -> None:
    """Remove internal calls from the tracebacks of an error and of its reasons.

    Parameters:
        raised_in: the traceback of the error itself.
    """
    if should_show_full_tracebacks():
        return
    # An error here must not replace the first.
    with suppress(Exception):
        for link in error_and_reasons(error):
            _shorten(raised_in if link is error else link.__traceback__)


def error_and_reasons(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its causes and contexts, and the errors in a group."""
    visited: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is None or id(link) in visited:
            continue
        visited.add(id(link))
        yield link
        pending += [link.__cause__, link.__context__]
        # By name, since Python 3.10 has no groups.
        if type(link).__name__ in ("ExceptionGroup", "BaseExceptionGroup"):
            pending += link.exceptions  # type: ignore[attr-defined]


def _shorten(trace: TracebackType | None) -> None:
    entries: list[TracebackType] = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    packages = [str(entry.tb_frame.f_globals.get("__name__")).partition(".")[0] for entry in entries]
    last = max((index for index, package in enumerate(packages) if package in INTERNAL_PACKAGES), default=0)
    hidden = INTERNAL_PACKAGES | WRAPPING_PACKAGES
    between = [entry for entry, package in zip(entries[:last], packages, strict=False) if package not in hidden]
    # The first entry is the called method, or the function that caught a cause.
    visible = list(dict.fromkeys([*entries[:1], *between, *entries[last:]]))
    for entry, following in zip(visible, [*visible[1:], None], strict=True):
        entry.tb_next = following


# ---- The error that ends the program ---------------------------------------------------------------------------------


def report_uncaught(report: Callable[[BaseException], None]) -> None:
    """Register a function to call before an error that ends the program is printed."""
    if report not in _reports:
        _reports.append(report)
    _install()


def print_instead(error: KeyboardInterrupt, lines: Sequence[str]) -> None:
    """Print lines instead of the traceback, if the interruption ends the program."""
    setattr(error, LINES, lines)
    _install()


def _install() -> None:
    earlier_hook = sys.excepthook
    if getattr(earlier_hook, "__module__", None) == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _handled
        if _handled is error:
            # A tracker's hook has called this hook again.
            earlier_hook(kind, error, trace)
            return
        _handled = error
        interruptions = list(_interruptions(error))
        lines = next((getattr(link, LINES) for link in interruptions if hasattr(link, LINES)), None)
        if lines is not None and not sys.flags.inspect:
            # Let another Ctrl-C end the program at once.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            for report in _reports:
                # An error here must not replace the first.
                with suppress(Exception):
                    report(error)
            # Other hooks notify trackers and print the traceback, which is shown only if a step has failed.
            is_shown = lines is None or any(link.__cause__ is not None for link in interruptions)
            with nullcontext() if is_shown else redirect_stderr(io.StringIO()):
                earlier_hook(kind, error, trace)
        finally:
            _handled = None
            print(*(lines or ()), sep="\n", end="\n" if lines else "", file=sys.stderr, flush=True)

    sys.excepthook = hook


def _interruptions(error: BaseException | None) -> Iterator[KeyboardInterrupt]:
    # The context may be an earlier Ctrl-C.
    while isinstance(error, KeyboardInterrupt):
        yield error
        error = error.__context__
