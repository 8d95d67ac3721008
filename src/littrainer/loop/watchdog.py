"""The watchdog of `hang_timeout`: a thread that detects a hang, prints all stacks and ends the training."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from littrainer.checkpoint.atomic_write import STAGING_DIR
from littrainer.checkpoint.layout import STACKS_NAME
from littrainer.data.workers import list_loader_workers
from littrainer.distributed.collectives import describe_last_collective, is_distributed
from littrainer.distributed.environment import get_hang_timeout, get_reports_folder
from littrainer.distributed.failures import (
    HEARTBEAT_FILE,
    HangError,
    dump_all_stacks,
    open_stacks,
    report_error,
    set_step_of_error,
)

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.state import TrainerState
    from littrainer.loop.run import TrainingRun

MAX_CHECK_INTERVAL_S = 1.0
# For the stacks of the other processes.
PEER_REPORT_TIMEOUT_S = 3.0
# After each of two interrupts.
EXIT_TIMEOUT_S = 5.0


class Watchdog(AbstractContextManager["Watchdog"]):
    """A block whose training is ended if it hangs.

    The thread reads counts that the training updates anyway, so that a step costs nothing. It also touches a heartbeat
    file, by which `littrainer run --hang-timeout` detects a hung process.

    Parameters:
        args: the arguments; `littrainer run --hang-timeout` overrides their `hang_timeout`. Without either the
            watchdog is off.
        targets: returns the training, None while it begins or ends, and the running evaluation or None.

    Raises:
        HangError: at the end of the block. If the block does not end soon, the process exits.
    """

    def __init__(
        self,
        args: TrainingArguments,
        state: Callable[[], TrainerState],
        targets: Callable[[], tuple[TrainingRun | None, Any]],
    ):
        self.seconds = get_hang_timeout(args)
        self._args = args
        self._state = state
        self._targets = targets
        # Cached, since an override of `_get_output_dir` may be slow.
        self._get_folder = functools.lru_cache(maxsize=1)(lambda run: run.folder)
        self._is_over = threading.Event()
        self._error: HangError | None = None
        self._run: TrainingRun | None = None
        self._earlier_handler: Any = None
        folder = get_reports_folder()
        self._heartbeat = None if folder is None else folder / f"{HEARTBEAT_FILE}-{os.getpid()}"

    def __enter__(self) -> Watchdog:
        if self.seconds:
            open_stacks()
            if threading.current_thread() is threading.main_thread():
                self._earlier_handler = signal.signal(signal.SIGINT, self._on_interrupt)
            self._touch_heartbeat()
            self._thread = threading.Thread(target=self._watch, name="littrainer watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if not self.seconds:
            return
        self._is_over.set()
        try:
            # The thread may be printing; loader processes that it ends raise an error in the block.
            self._thread.join(PEER_REPORT_TIMEOUT_S + EXIT_TIMEOUT_S)
        finally:
            if signal.getsignal(signal.SIGINT) == self._on_interrupt:
                signal.signal(signal.SIGINT, self._earlier_handler or signal.SIG_DFL)
        if self._error is not None:
            self._print_last_batch()
        if self._heartbeat is not None:
            self._heartbeat.unlink(missing_ok=True)
        if self._error is not None and error not in (None, self._error):
            raise self._error from error

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._error is not None:
            raise self._error
        if callable(self._earlier_handler):
            self._earlier_handler(number, frame)
        elif self._earlier_handler == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _watch(self) -> None:
        last_progress, since = None, time.monotonic()
        while not self._wait_for_end(min(MAX_CHECK_INTERVAL_S, self.seconds / 4)):
            progress = self._read_progress()
            if progress is None or progress != last_progress:
                last_progress, since = progress, time.monotonic()
            elif time.monotonic() - since >= self.seconds:
                self._end_training()
                return

    def _touch_heartbeat(self) -> None:
        if self._heartbeat is not None:
            with suppress(OSError):
                self._heartbeat.touch()

    def _wait_for_end(self, seconds: float) -> bool:
        """Return whether the block ends within this time, and touch the heartbeat meanwhile."""
        self._touch_heartbeat()
        while seconds > 0 and not self._is_over.wait(min(MAX_CHECK_INTERVAL_S, seconds)):
            seconds -= MAX_CHECK_INTERVAL_S
            self._touch_heartbeat()
        return self._is_over.is_set()

    def _read_progress(self) -> Any:
        """Return values that change with progress; None without a training."""
        run, evaluation = self._targets()
        if run is None:
            return None
        files = []
        with suppress(OSError):
            files = [(path, path.stat().st_size) for path in Path(self._get_folder(run), STAGING_DIR).rglob("*")]
        batches = run.windows.micro_batches_read, run.windows.progress.batches_skipped
        return self._state().global_step, batches, None if evaluation is None else evaluation.batches_done, files

    def _end_training(self) -> None:
        state = self._state()
        self._run, evaluation = self._targets()
        where = f"at optimizer step {state.global_step} of {state.max_steps}"
        if evaluation is not None:
            where += f", after {evaluation.batches_done} batches of an evaluation"
        self._error = HangError(
            f"Training has not moved for {self.seconds:g} s (hang_timeout), {where}. The stacks of its threads are "
            "above. If a step, a batch of an evaluation, its metrics or a save may take longer, raise hang_timeout."
        )
        set_step_of_error(self._error, state.global_step)
        self._print_stacks(where)
        if is_distributed():
            self._wait_for_end(PEER_REPORT_TIMEOUT_S)
        # The update guard may defer the first interrupt.
        for _ in range(2):
            if self._earlier_handler is not None and not self._is_over.is_set():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            if self._wait_for_end(EXIT_TIMEOUT_S):
                return
        self._print_last_batch()
        report_error(self._error)
        print(f"littrainer: the process ends, since it did not answer: {self._error}", file=sys.stderr, flush=True)
        os._exit(1)

    def _print_stacks(self, where: str) -> None:
        process = f"process {self._args.process_index} of {self._args.world_size} (pid {os.getpid()})"
        report = dump_all_stacks(
            f"littrainer: {process} has not moved for {self.seconds:g} s, {where}",
            list_loader_workers(),
            lambda: f"Last collective operation: {describe_last_collective() or 'not known'}",
        )
        self._print(report, f"littrainer: the stacks are in {self._args.output_dir}/{STACKS_NAME} too")

    def _print_last_batch(self) -> None:
        # This changes random generators, so the watchdog calls it only before it ends the process.
        with suppress(Exception):
            report = f"{_describe_last_batch(self._run)}\n"
            print(report, end="", file=open_stacks(), flush=True)
            self._print(report)

    def _print(self, report: str, note: str = "") -> None:
        print(report, end="", file=sys.stderr, flush=True)
        if self._heartbeat is None:
            with suppress(OSError):
                os.makedirs(self._args.output_dir, exist_ok=True)
                # Unbuffered, since other processes append too.
                with open(os.path.join(self._args.output_dir, STACKS_NAME), "ab", buffering=0) as file:
                    file.write(report.encode())
                print(note, end="\n" if note else "", file=sys.stderr, flush=True)


def _describe_last_batch(run: TrainingRun | None) -> str:
    if run is None or not run.windows.micro_batches_read:
        return "No micro-batch has been read."
    number = run.windows.micro_batches_read
    rows = run.windows.find_rows(run.epoch, number - 1)
    row_text = "" if rows is None else f", rows {', '.join(map(str, rows))}"
    return f"Last micro-batch: number {number} of epoch {run.epoch}{row_text}."
