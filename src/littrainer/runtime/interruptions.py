"""Ctrl-C and StopIteration of the user's code, which Lightning's loops would handle."""

from __future__ import annotations

import signal
import threading
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any


class UserStopIteration(RuntimeError):
    """A wrapper of a StopIteration of the user's code, on which Lightning's loops would end silently."""


class ReraiseUserStopIteration(AbstractContextManager[None]):
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, UserStopIteration) and error.__cause__ is not None:
            raise error.__cause__ from None


class PythonInterruptions(ReraiseUserStopIteration):
    """A block in which Lightning ends on Ctrl-C or StopIteration like a plain Python loop.

    On Ctrl-C Lightning exits with status 1 and ignores later signals; this block raises KeyboardInterrupt.
    """

    def __enter__(self) -> None:
        self._handler = signal.getsignal(signal.SIGINT) if _is_main_thread() else None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        super().__exit__(kind, error, traceback)
        if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None


class UpdateGuard(AbstractContextManager["UpdateGuard"]):
    """A guard that defers Ctrl-C during an optimizer step, so that weights, optimizer and step count are consistent.

    Between `hold()` and `release()` the first Ctrl-C is deferred; a second is handled at once, in case the step hangs.
    The start of loader processes is guarded too.
    """

    def __init__(self) -> None:
        self._is_held = False
        self._deferred: tuple[int, FrameType | None] | None = None
        self._handler: Any = None

    def __enter__(self) -> UpdateGuard:
        handler = signal.getsignal(signal.SIGINT) if _is_main_thread() else None
        # SIG_IGN and SIG_DFL cannot be deferred.
        if callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        # `==`, since each access makes a new bound method.
        is_installed = self._handler is not None and signal.getsignal(signal.SIGINT) == self._on_signal
        if is_installed:
            signal.signal(signal.SIGINT, self._handler)
        try:
            self.release()
        except KeyboardInterrupt as interruption:
            # An explicit cause, since the report of Ctrl-C shows the traceback of a cause only.
            has_failed = isinstance(error, Exception) and not isinstance(error, UserStopIteration)
            raise interruption from (error if has_failed else None)
        finally:
            if is_installed:
                # The handler may refer to the session.
                self._handler = None

    def hold(self) -> None:
        self._is_held = True

    def release(self) -> None:
        self._is_held = False
        if self._deferred is not None:
            deferred, self._deferred = self._deferred, None
            self._handler(*deferred)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_held and self._deferred is None:
            self._deferred = (number, frame)
        else:
            self._deferred = None
            self._handler(number, frame)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
