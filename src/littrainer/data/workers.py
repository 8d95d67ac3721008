"""The start of a DataLoader's workers, which leave signals to the process that trains, and name samples in errors."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, IterableDataset

from littrainer.arguments.fields import DEFAULT_ANNOUNCING_SIGNAL
from littrainer.interruptions import UpdateGuard

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

# torch reads the samples of a batch and hands them to the collator here, and raises a worker's errors there.
READING, RAISED_AGAIN = ("torch.utils.data._utils.fetch", "fetch"), ("torch._utils", "reraise")
PLACES_OF_SAMPLES = "possibly_batched_index"
# Samples that are named one by one.
MOST_NAMED = 16
# The signals that this process answers now, and the workers that leave signals to it.
_answered: Sequence[signal.Signals] = ()
_workers: WeakSet[BaseProcess] = WeakSet()


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


def answer(signals: Sequence[signal.Signals]) -> Sequence[signal.Signals]:
    """From now on the process that trains answers these signals, and its workers leave them to it.

    Returns:
        those that it answered before.
    """
    global _answered
    before, _answered = _answered, signals
    answering().value = bool(signals)
    return before


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
        self.parent = os.getppid()
        for number in (signal.SIGINT, *self.signals):
            # As a function, since programs that the dataset starts would inherit that a signal is ignored.
            signal.signal(number, self._leave_or_end)
            # A process that was spawned gives up its functions before it is at its end.
            atexit.register(signal.signal, number, signal.SIG_IGN)
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self.signals)
        torch.utils.data._utils.worker.ExceptionWrapper = WorkerError  # type: ignore[misc]
        if self.own is not None:
            self.own(worker)

    def _leave_or_end(self, number: int, _: Any) -> None:
        is_left = number == signal.SIGINT or self.answering.value
        if not is_left or os.getppid() != self.parent:
            os._exit(0)


class WorkerError(ExceptionWrapper):
    """A worker's error on its way to the process that trains, with the samples that it came up with."""

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self.reading = reading_in(sys.exc_info()[2])


def read_batches(
    loader: Any, iterate: Callable[[], Iterator[Any]] | None = None, signals: Iterable[signal.Signals] = ()
) -> Iterator[Any]:
    """The batches of a loader.

    Workers that it starts for them leave to this process the signals that it answers now.

    Parameters:
        loader: a DataLoader, or whatever can be iterated.
        iterate: begins the iteration, where the loader's own `__iter__` calls this.
        signals: those that this process may answer later on.

    Raises:
        RuntimeError: a map-style dataset or the collator has raised StopIteration, which would look like the end of the
            data.
    """
    iterate = iterate or (lambda: iter(loader))
    if not isinstance(loader, DataLoader):
        return iterate()
    if loader.num_workers:
        with _starting_workers(loader, {*signals, *_answered}):
            batches = iterate()
    else:
        batches = iterate()
    return batches if isinstance(loader.dataset, IterableDataset) else _read(batches)


@contextmanager
def _starting_workers(loader: DataLoader, signals: Collection[signal.Signals]) -> Iterator[None]:
    """Within it a loader may start its workers: no signal is lost, and none ends a worker that is not ready for it.

    Ctrl-C waits until they are up. While a process is forked, Python drops what a signal's handler raises.
    """
    own, others = loader.worker_init_fn, multiprocessing.active_children()
    loader.worker_init_fn = WorkerStart(own, signals)
    blocks = signals and hasattr(signal, "pthread_sigmask")
    with UpdateGuard() as guard:
        guard.hold()
        if blocks:
            method = (loader.multiprocessing_context or multiprocessing).get_start_method()
            # Started meanwhile, these would unblock the signals again, or keep them blocked in all later processes.
            if method != "fork":
                resource_tracker.ensure_running()
            if method == "forkserver":
                # It cannot be imported where there is none.
                import_module("multiprocessing.forkserver").ensure_running()
        # Processes inherit what is blocked, through fork and spawn.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals) if blocks else ()
        try:
            yield
        finally:
            loader.worker_init_fn = own
            if blocks:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                _workers.update(set(multiprocessing.active_children()).difference(others))


def end_workers(loader: Any) -> None:
    """End the lasting workers of a loader now. When a loader is collected, torch waits five seconds for each."""
    if isinstance(loader, DataLoader) and loader._iterator is not None:
        loader._iterator._shutdown_workers()  # type: ignore[attr-defined]
        loader._iterator = None


@atexit.register
def _kill_workers() -> None:
    # One that hangs in a library answers no signal by a function of Python's, and would be waited for.
    for worker in _workers:
        worker.kill()


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


def _read(batches: Iterator[Any]) -> Iterator[Any]:
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
