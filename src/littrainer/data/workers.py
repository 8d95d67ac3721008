"""Worker processes of DataLoaders: signal handling, and notes on the samples that an error was raised for."""

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

# Attribute of an error that describes the samples.
READING, READING_A_BATCH = "_littrainer_reading", "while data was read for a batch"
# Samples or batch entries in a message.
MAX_NAMED = 16
# Signals handled by this process, and loader workers, with whether they ignore the signals.
_handled: Sequence[signal.Signals] = ()
_workers: WeakKeyDictionary[BaseProcess, bool] = WeakKeyDictionary()


def set_handled_signals(signals: Sequence[signal.Signals]) -> Sequence[signal.Signals]:
    """Set the signals that new workers ignore; return the previous signals."""
    global _handled
    previous, _handled = _handled, signals
    return previous


class WorkerInit:
    """Function for `worker_init_fn` that makes workers ignore signals which the training process handles."""

    def __init__(self, init_fn: Callable[[int], None] | None, signals: Iterable[signal.Signals]):
        self.init_fn = init_fn
        self.signals = tuple(signals)

    def __call__(self, worker: int) -> None:
        self.parent = os.getppid()
        for number in (signal.SIGINT, *self.signals):
            # Not SIG_IGN, which programs that the dataset starts would inherit.
            signal.signal(number, self._exit_if_orphaned)
            # Spawned processes drop Python handlers before they exit.
            atexit.register(signal.signal, number, signal.SIG_IGN)
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self.signals)
        torch.utils.data._utils.worker.ExceptionWrapper = WorkerError  # type: ignore[misc]
        fetch._MapDatasetFetcher = _NamingFetcher  # type: ignore[misc]
        if self.init_fn is not None:
            self.init_fn(worker)

    def _exit_if_orphaned(self, number: int, _: Any) -> None:
        if os.getppid() != self.parent:
            os._exit(0)


class WorkerError(ExceptionWrapper):
    """Wrapper of a worker's error that carries the description of samples to the training process."""

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self.reading = getattr(sys.exc_info()[1], READING, None)

    def reraise(self) -> None:
        try:
            super().reraise()
        except Exception as error:
            _set_reading(error, self.reading)
            raise


def iterate_batches(loader: Any, iterate: Callable[[], Iterator[Any]] | None = None) -> Iterator[Any]:
    """Return an iterator over a loader whose workers ignore the signals that this process handles.

    Parameters:
        iterate: creates the iterator, for a loader whose `__iter__` calls this function.

    Raises:
        RuntimeError: a map-style dataset or the collator raised StopIteration, which would end the epoch.
    """
    iterate = iterate or (lambda: iter(loader))
    with _add_reading_notes():
        if isinstance(loader, DataLoader) and loader.num_workers:
            with _starting_workers(loader):
                batches = iterate()
            _workers.update(dict.fromkeys(getattr(batches, "_workers", ()), bool(_handled)))
        else:
            batches = iterate()
    return _iterate_with_notes(batches)


def _iterate_with_notes(batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        # Patched at each batch, since a script's loader may create torch's iterator late; inline for speed.
        fetch._MapDatasetFetcher = _NamingFetcher  # type: ignore[misc]
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:
            _set_reading(error, READING_A_BATCH)
            raise
        finally:
            fetch._MapDatasetFetcher = _MapDatasetFetcher  # type: ignore[misc]
        yield batch


@contextmanager
def _add_reading_notes() -> Iterator[None]:
    fetch._MapDatasetFetcher = _NamingFetcher  # type: ignore[misc]
    try:
        yield
    except Exception as error:
        _set_reading(error, READING_A_BATCH)
        raise
    finally:
        fetch._MapDatasetFetcher = _MapDatasetFetcher  # type: ignore[misc]


class _NamingFetcher(_MapDatasetFetcher):
    """Fetcher for map-style datasets, whose errors name the samples."""

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
            _set_reading(error, _describe_samples(samples))
            raise


def _describe_samples(samples: Any) -> str:
    if not isinstance(samples, list) or not samples:
        return "while samples were read for a batch"
    named = ", ".join(map(str, samples[:MAX_NAMED])) + (", ..." if len(samples) > MAX_NAMED else "")
    return f"while the samples {named} were read for a batch"


def _set_reading(error: BaseException, reading: str | None) -> None:
    if reading is not None and getattr(error, READING, None) is None:
        with suppress(AttributeError):
            setattr(error, READING, reading)


@contextmanager
def _starting_workers(loader: DataLoader) -> Iterator[None]:
    # Workers start with signals blocked, until their handlers are set. Ctrl-C is deferred until all have started,
    # since Python drops an error that a signal handler raises during a fork.
    init_fn, signals = loader.worker_init_fn, _handled
    loader.worker_init_fn = WorkerInit(init_fn, signals)
    can_block = signals and hasattr(signal, "pthread_sigmask")
    with UpdateGuard() as guard:
        guard.hold()
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, signals) if can_block else ()
        try:
            yield
        finally:
            loader.worker_init_fn = init_fn
            if can_block:
                signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def list_loader_workers() -> list[BaseProcess]:
    return [child for child in multiprocessing.active_children() if child in _workers]


def shut_down_workers(loader: Any) -> None:
    """Shut down a loader's persistent workers; on garbage collection torch would wait five seconds for each."""
    if isinstance(loader, DataLoader) and loader._iterator is not None:
        loader._iterator._shutdown_workers()  # type: ignore[attr-defined]
        loader._iterator = None


@atexit.register
def _kill_workers() -> None:
    # Workers that ignore signals would block the exit if hung in a library.
    for worker, ignores_signals in _workers.items():
        if ignores_signals:
            worker.kill()
