"""Work done by a thread, whose end can be waited for whatever interrupts the wait."""

from __future__ import annotations

import threading
from collections.abc import Callable


class ThreadedWork:
    """A piece of work that a thread of its own does, or `start` itself where the system has no thread to give.

    Parameters:
        work: what to do; what it raises is kept.
        name: the thread's.

    Attributes:
        error: what the work ended with, if it was an exception.
    """

    def __init__(self, work: Callable[[], object], name: str | None = None) -> None:
        self._work = work
        self._name = name
        # Not the thread's own end: a join that Ctrl-C interrupts takes a running thread for one that has ended.
        self._has_ended = threading.Event()
        self.error: BaseException | None = None

    def start(self) -> None:
        """Begin."""
        try:
            threading.Thread(target=self._run, name=self._name).start()
        except RuntimeError:
            self._run()

    def has_ended(self) -> bool:
        """Whether it has been done, or has failed."""
        return self._has_ended.is_set()

    def wait(self) -> None:
        """Return when it has been done, or has failed."""
        self._has_ended.wait()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error
        finally:
            self._has_ended.set()
