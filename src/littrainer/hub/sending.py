"""One thread that does pieces of work in order, and for which the end of the program waits a while."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any

logger = logging.getLogger(__name__)

Piece = tuple[Future[Any], Callable[[], Any]]

# For which the end of the program waits for what is on its way.
LONGEST_WAIT_AT_EXIT_SECONDS = 3600.0


class WorkInOrder:
    """A thread that is started with the first piece of work, and that keeps no program alive by itself.

    Attributes:
        jobs: the Futures of what has not ended yet, and of what ended last.
    """

    def __init__(self) -> None:
        self.jobs: list[Future[Any]] = []
        self._queue: SimpleQueue[Piece | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def __reduce__(self) -> Any:
        # What is copied or sent to another process has no thread there.
        return (type(self), ())

    def is_done(self) -> bool:
        """Whether all that was to be done is done."""
        return all(job.done() for job in self.jobs)

    def wait_until_done(self, seconds: float | None = None) -> bool:
        """Return when all is done, or when so many seconds have passed; whether all is done."""
        return not wait(self.jobs, seconds).not_done

    def cancel(self) -> None:
        """Drop what has not begun; what has begun goes on."""
        self.jobs = [job for job in self.jobs if not (job.cancel() or job.done())]

    def run(self, work: Callable[[], Any]) -> Future[Any]:
        """Do a piece of work after what is on its way."""
        job: Future[Any] = Future()
        self.jobs = [*(one for one in self.jobs if not one.done()), job]
        self._queue.put((job, work))
        if self._thread is None:
            # A worker of a ThreadPoolExecutor could not be left behind by a program that ends.
            self._thread = threading.Thread(target=_serve, args=(self._queue,), name="push to the Hub", daemon=True)
            self._thread.start()
            # What no one can give any more work has no thread either.
            weakref.finalize(self, self._queue.put, None)
            _wait_at_exit_for(self)
        return job

    def is_at_work(self) -> bool:
        """Whether something is on its way in this process; in a fork of it the thread does not go on."""
        return self._thread is not None and self._thread.is_alive() and not self.is_done()

    def finish_before_exit(self, seconds: float) -> None:
        """The program ends: wait for what is on its way, so many seconds at most; an interruption ends the wait."""
        doing = self.describe()
        with contextlib.suppress(KeyboardInterrupt):
            logger.warning("%s. The program ends when that is done; Ctrl-C ends it at once.", doing)
            self.wait_until_done(seconds)
        if not self.is_done():
            self.cancel()
            logger.error("%s, and the program ends without it.", doing)

    def describe(self) -> str:
        """What is on its way, as a sentence without its full stop."""
        return "Work for the Hub is on its way"


def _serve(queue: SimpleQueue[Piece | None]) -> None:
    while (piece := queue.get()) is not None:
        job, work = piece
        if job.set_running_or_notify_cancel():
            try:
                job.set_result(work())
            except BaseException as error:
                job.set_exception(error)
        # Nothing of it is kept while the thread waits for the next one.
        del piece, job, work


_waited_for: weakref.WeakSet[WorkInOrder] = weakref.WeakSet()
_is_registered = False


def _wait_at_exit_for(work: WorkInOrder) -> None:
    global _is_registered
    _waited_for.add(work)
    if not _is_registered:
        _is_registered = True
        # Python's own pools, which the Hub's client uploads with, take no work once the functions of `atexit` run.
        register = getattr(threading, "_register_atexit", atexit.register)
        register(_finish_all_before_exit)


def _finish_all_before_exit() -> None:
    for work in list(_waited_for):
        if work.is_at_work():
            work.finish_before_exit(LONGEST_WAIT_AT_EXIT_SECONDS)
