"""Signals and StopIteration, which Lightning's loops take for their own, reaching the user as Python has them."""

from __future__ import annotations

import signal
import threading
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any


class UserStopIteration(RuntimeError):
    """Carries a StopIteration of the user's code through Lightning's loops, which would end quietly on it."""


class ReraiseUserStopIteration(AbstractContextManager[None]):
    """Within it Lightning's hooks run by themselves: a StopIteration that they carry leaves it as such."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, UserStopIteration) and error.__cause__ is not None:
            raise error.__cause__ from None


class PythonInterruptions(ReraiseUserStopIteration):
    """Code of Lightning within it ends on Ctrl-C or a StopIteration as a plain Python loop would.

    On Ctrl-C Lightning exits with status 1 and leaves further ones ignored: here KeyboardInterrupt is raised.
    """

    def __enter__(self) -> None:
        self._handler = signal.getsignal(signal.SIGINT) if _in_main_thread() else None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        super().__exit__(kind, error, traceback)
        if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None


class UpdateGuard(AbstractContextManager["UpdateGuard"]):
    """Keeps Ctrl-C out of the optimizer step, so that it finds weights, optimizer and step count in agreement.

    Between `hold()` and `release()` the first Ctrl-C waits; a second one is let through, should the step hang. So it
    does while loader processes are started.
    """

    def __init__(self) -> None:
        self._holds = False
        self._waiting: tuple[int, FrameType | None] | None = None
        self._handler: Any = None

    def __enter__(self) -> UpdateGuard:
        handler = signal.getsignal(signal.SIGINT) if _in_main_thread() else None
        # There is no handler to defer if Ctrl-C is ignored, or ends the process.
        if callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._answer)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        # Each access makes another bound method.
        is_own = self._handler is not None and signal.getsignal(signal.SIGINT) == self._answer
        if is_own:
            signal.signal(signal.SIGINT, self._handler)
        try:
            self.release()
        except KeyboardInterrupt as interruption:
            # An explicit cause, since the report of Ctrl-C shows the traceback of a failure, and not of a context.
            has_failed = isinstance(error, Exception) and not isinstance(error, UserStopIteration)
            raise interruption from (error if has_failed else None)
        finally:
            if is_own:
                # The handler may be a method of an object that holds the session.
                self._handler = None

    def hold(self) -> None:
        """The optimizer begins to change the weights."""
        self._holds = True

    def release(self) -> None:
        """The step is counted; what has waited is answered."""
        self._holds = False
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._handler(*waiting)

    def _answer(self, number: int, frame: FrameType | None) -> None:
        if self._holds and self._waiting is None:
            self._waiting = (number, frame)
        else:
            self._waiting = None
            self._handler(number, frame)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
