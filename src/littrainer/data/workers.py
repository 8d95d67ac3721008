"""The worker processes of a DataLoader: the signals that they leave to the training process, and samples in errors."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader
from torch.utils.data._utils import fetch
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from littrainer.runtime.interruptions import UpdateGuard

# Attribute of an error that was raised while data was read: half a sentence on the samples.
READING, READING_A_BATCH = "_littrainer_reading", "while data was read for a batch"
# Samples, or entries of a batch, that a message names.
MAX_NAMED = 16
# The signals that this process handles now, and the workers of loaders, with whether they leave signals to it.
_handled: Sequence[signal.Signals] = ()
_workers: WeakKeyDictionary[BaseProcess, bool] = WeakKeyDictionary()


def set_handled_signals(signals: Sequence[signal.Signals]) -> Sequence[signal.Signals]:
    """Set the signals that this process handles from now on, which its workers leave to it; return those before."""
    global _handled
    before, _handled = _handled, signals
    return before


class WorkerInit:
    """A `worker_init_fn` that leaves signals to the process that started the worker, before the loader's own function.

    A scheduler sends a signal to all processes, and without its workers a training could take no step any more.
    """

    def __init__(self, own: Callable[[int], None] | None, signals: Iterable[signal.Signals]):
        self.own, self.signals = own, tuple(signals)

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
        fetch._MapDatasetFetcher = _NamingFetcher  # type: ignore[misc]
        if self.own is not None:
            self.own(worker)

    def _leave_or_end(self, number: int, _: Any) -> None:
        if os.getppid() != self.parent:
            os._exit(0)


class WorkerError(ExceptionWrapper):
    """A worker's error on its way to the process that trains, with the samples that it was raised for."""

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self.reading = getattr(sys.exc_info()[1], READING, None)

    def reraise(self) -> None:
        """Raise the error in the process that trains."""
        try:
            super().reraise()
        except Exception as error:
            _note_reading(error, self.reading)
            raise


def iterate_batches(loader: Any, iterate: Callable[[], Iterator[Any]] | None = None) -> Iterator[Any]:
    """Return the batches of a loader, whose workers leave to this process the signals that it handles now.

    Parameters:
        loader: a DataLoader, or any iterable.
        iterate: begins the iteration, if the loader's own `__iter__` calls this.

    Raises:
        RuntimeError: a map-style dataset or the collator has raised StopIteration, which would look like the end of the
            data.
    """
    iterate = iterate or (lambda: iter(loader))
    with _note_reading_errors():
        if isinstance(loader, DataLoader) and loader.num_workers:
            with _starting_workers(loader):
                batches = iterate()
            # torch has no public name for them, and another thread may start further children meanwhile.
            _workers.update(dict.fromkeys(getattr(batches, "_workers", ()), bool(_handled)))
        else:
            batches = iterate()
    return _read_on(batches)


def _read_on(batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        # A loader of the script may make torch's iterator with any batch. A context manager costs two calls.
        fetch._MapDatasetFetcher = _NamingFetcher  # type: ignore[misc]
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:
            _note_reading(error, READING_A_BATCH)
            raise
        finally:
            fetch._MapDatasetFetcher = _MapDatasetFetcher  # type: ignore[misc]
        yield batch


@contextmanager
def _note_reading_errors() -> Iterator[None]:
    fetch._MapDatasetFetcher = _NamingFetcher  # type: ignore[misc]
    try:
        yield
    except Exception as error:
        _note_reading(error, READING_A_BATCH)
        raise
    finally:
        fetch._MapDatasetFetcher = _MapDatasetFetcher  # type: ignore[misc]


class _NamingFetcher(_MapDatasetFetcher):
    """torch's reader of a map-style dataset; its errors name the samples that were read."""

    def fetch(self, samples: Any) -> Any:
        try:
            return super().fetch(samples)
        except StopIteration as end:
            raise RuntimeError(
                f"The dataset or the collator raised StopIteration {_describe_samples(samples)}, which would end the "
                "epoch there. Look for next() of an iterator that has ended; a dataset says with IndexError that it "
                "has no such sample."
            ) from end
        except Exception as error:
            _note_reading(error, _describe_samples(samples))
            raise


def _describe_samples(samples: Any) -> str:
    if not isinstance(samples, list) or not samples:
        return "while samples were read for a batch"
    named = ", ".join(map(str, samples[:MAX_NAMED])) + (", ..." if len(samples) > MAX_NAMED else "")
    return f"while the samples {named} were read for a batch"


def _note_reading(error: BaseException, reading: str | None) -> None:
    if reading is not None and getattr(error, READING, None) is None:
        with suppress(AttributeError):
            setattr(error, READING, reading)


@contextmanager
def _starting_workers(loader: DataLoader) -> Iterator[None]:
    # No signal is lost, and none ends a worker that is not ready for it. Ctrl-C waits until the workers are up, since
    # Python drops an error of a signal's handler while a process is forked.
    own, signals = loader.worker_init_fn, _handled
    loader.worker_init_fn = WorkerInit(own, signals)
    blocks = signals and hasattr(signal, "pthread_sigmask")
    with UpdateGuard() as guard:
        guard.hold()
        # Processes inherit what is blocked, through fork and spawn.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals) if blocks else ()
        try:
            yield
        finally:
            loader.worker_init_fn = own
            if blocks:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)


def list_loader_workers() -> list[BaseProcess]:
    """Return the worker processes that are alive, of all loaders that this process reads."""
    return [child for child in multiprocessing.active_children() if child in _workers]


def shut_down_workers(loader: Any) -> None:
    """End the lasting workers of a loader now. When a loader is collected, torch waits five seconds for each."""
    if isinstance(loader, DataLoader) and loader._iterator is not None:
        loader._iterator._shutdown_workers()  # type: ignore[attr-defined]
        loader._iterator = None


@atexit.register
def _kill_workers() -> None:
    # A worker that hangs in a library handles no signal by a function of Python's, and would be waited for.
    for worker, leaves_signals in _workers.items():
        if leaves_signals:
            worker.kill()
