"""Trials side by side on one machine: each in a process of its own, and the study in this one."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from contextlib import AbstractContextManager
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

from littrainer.search.failures import SearchMistake
from littrainer.search.side_by_side.conversation import Setting
from littrainer.search.side_by_side.device_shares import number_of_jobs, share_of, threads_of_each
from littrainer.search.side_by_side.trial_process import TrialProcess, TrialProcessDied
from littrainer.search.travelling.packing import packed
from littrainer.search.travelling.surroundings import surroundings

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

# A process in which a trial has ended with one of these carries out further ones.
HARMLESS = (ArithmeticError, ValueError)

__all__ = ["SideBySide", "TrialProcessDied", "number_of_jobs"]


class SideBySide(AbstractContextManager["SideBySide"]):
    """Carries out trials that threads of a study hand to it, each in a process of its own.

    A process takes one trial after the other, each with the Trainer as it is when this is made; after an error that may
    have left something behind in it, another one takes its place. GPUs and CPU threads are shared out among the
    processes. What a trial prints is written with its number.

    Parameters:
        trainer: the Trainer, with all that the search has set on it.
        jobs: how many trials run at once.
        survives: errors of trials after which the search goes on; any other one ends all trials.

    Raises:
        SearchMistake: processes cannot be started in this way on this system.
        TypeError: something that the Trainer holds cannot be sent to another process.
        ImportError: cloudpickle is not installed.
    """

    def __init__(self, trainer: Trainer, jobs: int, survives: tuple[type[BaseException], ...] = ()):
        if os.name != "posix":
            raise SearchMistake(
                f"n_jobs={jobs} runs trials side by side, which needs Linux or macOS: leave n_jobs out, or search with "
                'backend="ray".'
            )
        self._args = trainer.args
        self._jobs = jobs
        self._survives = survives
        self._packed = packed(trainer)
        self._trainer_file: IO[bytes] | None = None
        self._setting: Setting | None = None
        # Taken in a signal handler too, which may break in where its thread holds it.
        self._lock = threading.RLock()
        self._free_jobs = list(range(jobs))
        # Job -> process, since a job has a GPU of its own.
        self._idle: dict[int, TrialProcess] = {}
        self._busy: dict[int, TrialProcess] = {}
        # What has ended the search; all trials that run end with it.
        self._ended_by: BaseException | None = None
        self._handler: Any = None

    def __enter__(self) -> SideBySide:
        # Without a name, so that nothing is left of it however the search ends.
        self._trainer_file = tempfile.TemporaryFile(prefix="littrainer-search-")
        self._trainer_file.write(self._packed)
        self._trainer_file.flush()
        self._packed = b""
        self._setting = Setting(surroundings(), self._trainer_file.fileno(), threads_of_each(self._jobs))
        handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
        if callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        with self._lock:
            left = [*self._busy.values(), *self._idle.values()]
            self._busy.clear()
            self._idle.clear()
        for process in left:
            process.close()
        for process in left:
            process.end()
        if self._trainer_file is not None:
            self._trainer_file.close()
        if error is None:
            # Optuna asks the last trials that it starts for no error.
            self._raise_if_ended()

    def run(self, trial: Any) -> Any:
        """The objective of a trial; called in a thread of the study for each.

        Parameters:
            trial: an Optuna trial; what the other process asks it for is asked in this thread.

        Raises:
            optuna.TrialPruned: the trial was not worth going on with.
            TrialProcessDied: the process has ended without a result.
            BaseException: what has ended the trial, or the search.
        """
        job, process = self._taken()
        try:
            objective = process.carry_out(trial)
        except BaseException as error:
            self._settle(job, process, error)
            ended_by = self._ended_by
            if ended_by is None or ended_by is error:
                raise
            raise ended_by.with_traceback(None) from ended_by.__cause__
        self._put_back(job, process)
        return objective

    def _taken(self) -> tuple[int, TrialProcess]:
        with self._lock:
            self._raise_if_ended()
            job = self._free_jobs.pop(0)
            process = self._idle.pop(job, None)
        if process is None:
            process = self._new_process(job)
        with self._lock:
            self._busy[job] = process
            if self._ended_by is not None:
                process.interrupt()
        return job, process

    def _new_process(self, job: int) -> TrialProcess:
        assert self._setting is not None
        try:
            return TrialProcess(self._setting, share_of(self._args, job, self._jobs))
        except OSError as error:
            with self._lock:
                self._free_jobs.append(job)
            # The system starts no further process; it would not for the next trial.
            self._end_all(error)
            raise

    def _raise_if_ended(self) -> None:
        if self._ended_by is not None:
            raise self._ended_by.with_traceback(None) from self._ended_by.__cause__

    def _put_back(self, job: int, process: TrialProcess) -> None:
        with self._lock:
            self._busy.pop(job, None)
            self._idle[job] = process
            self._free_jobs.append(job)

    def _settle(self, job: int, process: TrialProcess, error: BaseException) -> None:
        """A trial has ended with an error: see what becomes of its process, and of the search."""
        if not _is_pruned(error) and not isinstance(error, self._survives):
            self._end_all(error)
        if self._ended_by is None and (_is_pruned(error) or isinstance(error, HARMLESS)):
            self._put_back(job, process)
            return
        process.end()
        with self._lock:
            self._busy.pop(job, None)
            self._free_jobs.append(job)

    def _end_all(self, error: BaseException) -> None:
        with self._lock:
            if self._ended_by is not None:
                return
            self._ended_by = error
            for process in self._busy.values():
                process.interrupt()

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-C: the first one lets the trials that run end, in some seconds; the search ends with them."""
        busy = list(self._busy.values())
        is_first = self._ended_by is None
        # Also where no trial runs: the next one may be about to.
        self._end_all(KeyboardInterrupt())
        if busy and is_first:
            return
        for process in busy:
            process.kill()
        self._handler(number, frame)


def _is_pruned(error: BaseException) -> bool:
    from optuna import TrialPruned

    return isinstance(error, TrialPruned)
