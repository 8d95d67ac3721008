"""The start of a DataLoader's workers, which leave signals to the process that trains, and name samples in errors."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import resource_tracker
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader

from littrainer.arguments.fields_additional import DEFAULT_ANNOUNCING_SIGNAL
from littrainer.interruptions import UpdateGuard

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

# torch reads the samples of a batch and hands them to the collator here, and raises a worker's errors there.
READING, RAISED_AGAIN = ("torch.utils.data._utils.fetch", "fetch"), ("torch._utils", "reraise")
PLACES_OF_SAMPLES = "possibly_batched_index"
# Samples that are named one by one.
MOST_NAMED = 16


def signals_that_save(args: TrainingArguments) -> tuple[signal.Signals, ...]:
    """The signals that training saves on, as `enable_jit_checkpoint` and `jit_checkpoint_signals` ask for it."""
    if not args.enable_jit_checkpoint:
        return ()
    given = args.jit_checkpoint_signals or DEFAULT_ANNOUNCING_SIGNAL
    return tuple(signal.Signals[name] for name in ([given] if isinstance(given, str) else given))


@cache
def answering() -> Any:
    """Whether the process that trains answers the signals that save: a `value` that worker processes share."""
    return multiprocessing.RawValue("b", 0)


class WorkerStart:
    """A `worker_init_fn` that leaves signals to the process that started the worker, before the loader's own one.

    A scheduler sends a signal to all processes, and without its workers a training could take no step any more.

    Parameters:
        own: the loader's own function.
        signals: the signals that save. They end the worker where that process does not answer them, as torch's handler
            does, so that whoever starts workers can also end them.
    """

    def __init__(self, own: Callable[[int], None] | None, signals: Iterable[signal.Signals]):
        self.own, self.signals = own, tuple(signals)
        self.answering: Any = answering() if self.signals else None

    def __call__(self, worker: int) -> None:
        # As functions, since programs that the dataset starts would inherit that a signal is ignored.
        answers = {**dict.fromkeys(self.signals, self._leave_or_end), signal.SIGINT: lambda *_: None}
        for number, answer in answers.items():
            signal.signal(number, answer)
            # A process that was spawned gives up its functions before it is at its end.
            atexit.register(signal.signal, number, signal.SIG_IGN)
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, *self.signals})
        torch.utils.data._utils.worker.ExceptionWrapper = WorkerError  # type: ignore[misc]
        if self.own is not None:
            self.own(worker)

    def _leave_or_end(self, *_: Any) -> None:
        if not self.answering.value:
            os._exit(0)


class WorkerError(ExceptionWrapper):
    """A worker's error on its way to the process that trains, with the samples that it came up with."""

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self.reading = reading_in(sys.exc_info()[2])


@contextmanager
def starting_workers(loader: DataLoader, signals: Iterable[signal.Signals] = ()) -> Iterator[None]:
    """Within it a loader may start its workers: no signal is lost, and none ends a worker that is not ready for it.

    Ctrl-C waits until they are up. While a process is forked, Python drops what a signal's handler raises.
    """
    if not loader.num_workers:
        yield
        return
    own = loader.worker_init_fn
    loader.worker_init_fn = WorkerStart(own, signals)
    with UpdateGuard() as guard:
        guard.hold()
        if (loader.multiprocessing_context or multiprocessing).get_start_method() != "fork":
            # Its start would unblock the signals again.
            resource_tracker.ensure_running()
        # Processes inherit what is blocked, through fork and spawn.
        blocks = hasattr(signal, "pthread_sigmask")
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *signals}) if blocks else ()
        try:
            yield
        finally:
            loader.worker_init_fn = own
            if blocks:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)


def reading_in(raised_in: TracebackType | None) -> str | None:
    """Half a sentence on the samples over which the dataset or the collator raised an error; None for other errors."""
    for frame, _ in traceback.walk_tb(raised_in):
        place = (frame.f_globals.get("__name__"), frame.f_code.co_name)
        if place == RAISED_AGAIN:
            return getattr(frame.f_locals.get("self"), "reading", None)
        if place == READING:
            samples = frame.f_locals.get(PLACES_OF_SAMPLES)
            # A stream is read by None for each sample.
            if not isinstance(samples, list) or not samples or samples[0] is None:
                return "while samples were read for a batch"
            named = ", ".join(map(str, samples[:MOST_NAMED])) + (", ..." if len(samples) > MOST_NAMED else "")
            return f"while the samples {named} were read for a batch"
    return None


def read_batches(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches of a map-style dataset, whose own StopIteration would look like the end of its data.

    Raises:
        RuntimeError: the dataset or the collator has raised one.
    """
    while True:
        try:
            batch = next(batches)
        except StopIteration as end:
            reading = reading_in(end.__traceback__)
            if reading is None:
                return
            raise RuntimeError(
                f"The dataset or the collator raised StopIteration {reading}, which would end the epoch there. Look "
                "for next() of an iterator that has ended; a dataset says with IndexError that it has no such sample."
            ) from end
        yield batch
