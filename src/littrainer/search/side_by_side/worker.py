"""The process of a trial: `python -m littrainer.search.side_by_side.worker` carries out trials of a search."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from littrainer.search.side_by_side.distant_trial import Ask
    from littrainer.trainer import Trainer

SECONDS_BETWEEN_LOOKS = 1.0
# As shells have it for a program that Ctrl-C has ended.
ENDED_BY_INTERRUPT = 130


def main(arguments: list[str]) -> int:
    """Carry out trials until the search ends.

    Parameters:
        arguments: the file descriptor of the connection, and the id of the process that searches.
    """
    # A process that was started in the background ignores it, and hands that on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_with(int(arguments[1]))
    channel = Channel(Connection(int(arguments[0])))
    try:
        _carry_out_all(channel)
    except KeyboardInterrupt:
        return ENDED_BY_INTERRUPT
    return 0


def _carry_out_all(channel: Channel) -> None:
    from littrainer.search.travelling.surroundings import enter

    setting: Setting | None = _received(channel)
    if setting is None:
        return
    enter(setting.surroundings, setting.threads)
    packed = _content_of(setting.trainer_file)
    while (task := _received(channel)) is not None:
        try:
            answer = Answer(_carried_out(channel, setting, packed, task))
        except BaseException as error:
            answer = answer_with(error)
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(*CLOSED):
            channel.send(answer)
        if isinstance(answer.error, KeyboardInterrupt):
            # The search is over, also where it was the script that raised this.
            raise answer.error
        del answer
        gc.collect()


def _content_of(descriptor: int) -> bytes:
    """What is in a file of which other processes read too; the descriptor is closed."""
    try:
        size = os.fstat(descriptor).st_size
        content = bytearray()
        while len(content) < size:
            # One read gives 2 GiB at most.
            piece = os.pread(descriptor, size - len(content), len(content))
            if not piece:
                raise EOFError(f"The packed Trainer has {len(content)} bytes of {size}.")
            content += piece
        return bytes(content)
    finally:
        os.close(descriptor)


def _received(channel: Channel) -> Any:
    """The next message; None where the search has ended."""
    try:
        return channel.receive()
    except CLOSED:
        return None


def _carried_out(channel: Channel, setting: Setting, packed: bytes, task: Task) -> Any:
    """The objective of a trial, on a Trainer as the search has found it."""
    from littrainer.search.side_by_side.distant_trial import DistantTrial
    from littrainer.search.travelling.packing import unpacked
    from littrainer.search.travelling.surroundings import set_log_levels
    from littrainer.search.trial import run_trial

    trainer = unpacked(packed)
    set_log_levels(setting.surroundings)
    _print_instead_of_bars(trainer)
    return run_trial(trainer, DistantTrial(task.number, asking(channel)))


def asking(channel: Channel) -> Ask:
    """What asks the search's side of a channel, from any thread."""
    lock = threading.Lock()

    def ask(of_study: bool, name: str, is_call: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with lock:
            channel.send(Question(of_study, name, is_call, args, kwargs))
            return value_of(channel.receive())

    return ask


def _print_instead_of_bars(trainer: Trainer) -> None:
    """Bars of several trainings would write over each other."""
    from littrainer.callbacks.progress import PrinterCallback, ProgressCallback

    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(PrinterCallback)


def end_with(starter: int) -> None:
    """End at once when the process that searches has ended, however it has."""

    def watch() -> None:
        while os.getppid() == starter:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        os._exit(1)

    threading.Thread(target=watch, name="littrainer-search", daemon=True).start()


if __name__ == "__main__":
    # The module under its own name, since `__main__` becomes the script's.
    from littrainer.search.side_by_side import worker

    status = worker.main(sys.argv[1:])
    # What Python does beyond this, taking modules apart, is slow after torch and of no use.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
