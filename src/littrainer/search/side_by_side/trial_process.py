"""One of the processes that carry out trials side by side, seen from the search."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing import Pipe
from typing import IO, Any, TextIO

from tqdm import tqdm

from littrainer.compat.redirect import PACKAGE_ROOT
from littrainer.search.side_by_side.conversation import (
    CLOSED,
    Answer,
    Channel,
    Question,
    Setting,
    Task,
    answer_with,
    value_of,
)
from littrainer.search.side_by_side.printed_lines import PrintedLines

SECONDS_BETWEEN_LOOKS = 0.5
# How long a process may take to close the runs of trackers, and end.
SECONDS_TO_END = 10.0
# Lines of stderr that tell why a process has ended.
LAST_LINES = 20
PIECE_BYTES = 65536
WAYS_TO_END: dict[int, str] = {
    signal.SIGKILL: " The system kills a process when memory runs out: let fewer trials run side by side (n_jobs), or "
    "smaller ones.",
}


class TrialProcessDied(RuntimeError):
    """The process of a trial has ended without a result; the message has its last words."""


class TrialProcess:
    """A process that carries out one trial after the other, until it is closed or something has gone wrong in it.

    Parameters:
        setting: what it is told first.
        variables: its environment.
    """

    def __init__(self, setting: Setting, variables: dict[str, str]):
        self._trial: int | None = None
        # When it is killed if it has not ended by then, in seconds of the monotonic clock.
        self._deadline: float | None = None
        self._last_words: deque[str] = deque(maxlen=LAST_LINES)
        here, there = Pipe()
        options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        descriptor = there.fileno()
        self._process = subprocess.Popen(
            [
                sys.executable,
                *options,
                "-m",
                "littrainer.search.side_by_side.worker",
                str(descriptor),
                str(os.getpid()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**variables, "PYTHONPATH": _with_package(variables.get("PYTHONPATH", ""))},
            pass_fds=(descriptor, setting.trainer_file),
            # Ctrl-C reaches the search alone, which decides what becomes of its trials.
            start_new_session=True,
        )
        there.close()
        self._channel = Channel(here)
        self._relays = [
            self._relay(self._process.stdout, lambda: sys.stdout),
            self._relay(self._process.stderr, lambda: sys.stderr, self._last_words),
        ]
        with contextlib.suppress(*CLOSED):
            self._channel.send(setting)

    def carry_out(self, trial: Any) -> Any:
        """The objective of a trial.

        Parameters:
            trial: what the process asks for values, here.

        Raises:
            TrialProcessDied: the process has ended.
            BaseException: what has ended the trial there.
        """
        self._trial = trial.number
        try:
            self._channel.send(Task(trial.number))
            while True:
                message = self._next_message()
                if isinstance(message, Answer):
                    return value_of(message)
                self._channel.send(answered(trial, message))
        except CLOSED:
            raise TrialProcessDied(self._how_it_died()) from None

    def interrupt(self) -> None:
        """Tell it to end, as Ctrl-C does; returns at once. `carry_out` kills it if it takes too long."""
        self._deadline = time.monotonic() + SECONDS_TO_END
        self._signal(signal.SIGINT)

    def kill(self) -> None:
        """End it, and what it has started."""
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """Tell it that no trial comes any more; returns at once."""
        with contextlib.suppress(OSError):
            self._channel.close()

    def end(self) -> None:
        """Wait until it has ended, for which it has some seconds."""
        self.close()
        try:
            self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        # What it has started, DataLoader workers for one, and not taken along.
        self.kill()
        for relay in self._relays:
            relay.join(SECONDS_TO_END)

    def _next_message(self) -> Any:
        # Processes that the other one has started may hold its end open when it is gone.
        while not self._channel.has_message(SECONDS_BETWEEN_LOOKS):
            if self._process.poll() is not None and not self._channel.has_message(0):
                raise EOFError
            if self._deadline is not None and time.monotonic() > self._deadline:
                self.kill()
        return self._channel.receive()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _how_it_died(self) -> str:
        self.end()
        status = self._process.returncode
        if status < 0:
            name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
            how = f"was ended by {name}.{WAYS_TO_END.get(-status, '')}"
        else:
            how = f"ended with status {status}."
        words = "\n".join(self._last_words)
        return f"The process of trial {self._trial} {how}" + (f" Its last words:\n{words}" if words else "")

    def _relay(
        self, stream: IO[bytes] | None, target: Callable[[], TextIO], kept: deque[str] | None = None
    ) -> threading.Thread:
        """Write what the process prints, each line with its trial."""
        assert isinstance(stream, io.BufferedReader)
        pieces = stream

        def write(texts: list[str]) -> None:
            for text in texts:
                if kept is not None:
                    kept.append(text)
                prefix = "" if self._trial is None else f"[trial {self._trial}] "
                with contextlib.suppress(ValueError, OSError):
                    tqdm.write(f"{prefix}{text}", file=target())

        def write_all() -> None:
            lines = PrintedLines()
            with pieces:
                while piece := pieces.read1(PIECE_BYTES):
                    write(lines.add(piece))
            write(lines.rest())

        thread = threading.Thread(target=write_all, name="littrainer-search-output", daemon=True)
        thread.start()
        return thread


def answered(trial: Any, question: Question) -> Answer:
    """What a trial of this process, or its study, says to a question."""
    try:
        found = getattr(trial.study if question.of_study else trial, question.name)
        return Answer(found(*question.args, **question.kwargs) if question.is_call else found)
    except Exception as error:
        return answer_with(error)


def _with_package(python_path: str) -> str:
    """A PYTHONPATH that finds this package, at its end."""
    folders = [folder for folder in python_path.split(os.pathsep) if folder]
    return os.pathsep.join([*folders, *([] if PACKAGE_ROOT in folders else [PACKAGE_ROOT])])
