"""Signals and StopIteration, which Lightning's loops take for their own, reaching the user as Python has them."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

Hook = TypeVar("Hook", bound=Callable[..., Any])


class StoppedByUserCode(RuntimeError):
    """Carries a StopIteration of the user's code through Lightning's loops, which would end quietly on it."""


def carries_stop_iteration(hook: Hook) -> Hook:
    """Decorates a hook that calls user code."""

    @functools.wraps(hook)
    def carrying(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except StopIteration as error:
            raise StoppedByUserCode from error

    return carrying  # type: ignore[return-value]


class PythonInterruptions(AbstractContextManager[None]):
    """What Lightning runs inside ends on Ctrl-C, SIGTERM or a StopIteration as a plain Python loop would.

    On Ctrl-C Lightning exits with status 1 and leaves further ones ignored: here KeyboardInterrupt is raised. On
    SIGTERM it finishes the micro-batch and exits with status 0: here the signal is delivered again, to whatever handled
    it before.
    """

    def __enter__(self) -> None:
        in_main_thread = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if in_main_thread else ()
        self._handlers = {number: signal.getsignal(number) for number in numbers}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        from lightning.pytorch.utilities.exceptions import SIGTERMException

        _put_back(self._handlers)
        if isinstance(error, StoppedByUserCode) and error.__cause__ is not None:
            raise error.__cause__ from None
        if isinstance(error, SIGTERMException):
            os.kill(os.getpid(), signal.SIGTERM)
        elif isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None


def _put_back(handlers: dict[Any, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None:
            signal.signal(number, handler)
