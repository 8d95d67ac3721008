"""Whether a signal has ended `ray.tune.run`, which takes and keeps signals, and returns as after a whole search."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from ray.tune import Callback

# On both of them Ray ends a search.
SIGNALS = ("SIGINT", "SIGUSR1")


class Interruption(Callback):
    """Notices the signals that Ray takes, and gives them back afterwards.

    Attributes:
        has_come: whether one of them has come.
    """

    def __init__(self) -> None:
        self.has_come = False
        self._before: dict[int, Any] = {}

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Leave the handlers after the block as they are before it."""
        if threading.current_thread() is threading.main_thread():
            numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
            self._before = {number: signal.getsignal(number) for number in numbers}
        try:
            yield
        finally:
            for number, handler in self._before.items():
                if handler is not None:
                    signal.signal(number, handler)

    def setup(self, *given: Any, **info: Any) -> None:
        """Ray has taken the signals: notice each that comes, and pass it on to Ray."""
        for number, before in self._before.items():
            taken = signal.getsignal(number)
            if callable(taken) and taken is not before:
                signal.signal(number, functools.partial(self._pass_on, taken))

    def _pass_on(self, taken: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None) -> None:
        self.has_come = True
        taken(number, frame)
