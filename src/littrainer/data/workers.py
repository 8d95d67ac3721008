"""The worker processes of a DataLoader: signals they leave to the process that trains, samples they name in errors, and
where random number generators stand, here and in them: they report it with each batch.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import random
import signal
import sys
import traceback
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from littrainer.errors.interruptions import UpdateGuard

# torch reads the samples of a batch and hands them to the collator here, and raises a worker's errors there.
READING, RAISED_AGAIN = ("torch.utils.data._utils.fetch", "fetch"), ("torch._utils", "reraise")
PLACES_OF_SAMPLES = "possibly_batched_index"
# Samples that are named one by one.
MOST_NAMED = 16
# The signals that this process answers now, and the workers that leave signals to it.
_answered: Sequence[signal.Signals] = ()
_workers: WeakSet[BaseProcess] = WeakSet()


def answer(signals: Sequence[signal.Signals]) -> Sequence[signal.Signals]:
    """From now on the process that trains answers these signals, and its workers leave them to it.

    Returns:
        those that it answered before.
    """
    global _answered
    before, _answered = _answered, signals
    return before


class WorkerStart:
    """A `worker_init_fn` that leaves signals to the process that started the worker, before the loader's own one.

    A scheduler sends a signal to all processes, and without its workers a training could take no step any more.

    Parameters:
        own: the loader's own function.
        signals: the signals that save.
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
        if self.own is not None:
            self.own(worker)

    def _leave_or_end(self, number: int, _: Any) -> None:
        if os.getppid() != self.parent:
            os._exit(0)


class WorkerError(ExceptionWrapper):
    """A worker's error on its way to the process that trains, with the samples that it came up with."""

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self.reading = reading_in(sys.exc_info()[2])


def read_batches(loader: Any, iterate: Callable[[], Iterator[Any]] | None = None) -> Iterator[Any]:
    """The batches of a loader.

    Workers that it starts for them leave to this process the signals that it answers now.

    Parameters:
        loader: a DataLoader, or whatever can be iterated.
        iterate: begins the iteration, where the loader's own `__iter__` calls this.

    Raises:
        RuntimeError: a map-style dataset or the collator has raised StopIteration, which would look like the end of the
            data.
    """
    iterate = iterate or (lambda: iter(loader))
    if not isinstance(loader, DataLoader):
        return iterate()
    if loader.num_workers:
        with _starting_workers(loader):
            batches = iterate()
    else:
        batches = iterate()
    return batches if isinstance(loader.dataset, IterableDataset) else _read(batches)


@contextmanager
def _starting_workers(loader: DataLoader) -> Iterator[None]:
    """Within it a loader may start its workers: no signal is lost, and none ends a worker that is not ready for it.

    Ctrl-C waits until they are up. While a process is forked, Python drops what a signal's handler raises.
    """
    own, others, signals = loader.worker_init_fn, multiprocessing.active_children(), _answered
    loader.worker_init_fn = WorkerStart(own, signals)
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


# ---- Where random number generators stand ----------------------------------------------------------------------------

# Generator's name -> its state, in tensors, numbers, texts and tuples only, so that it can be saved and loaded safely.
HostStates = dict[str, Any]


def host_states(python: bool = True, numpy: bool = True) -> HostStates:
    """The states of torch's, Python's and NumPy's global generators.

    Parameters:
        python, numpy: whether to read these, which takes fifty times as long as reading torch's.
    """
    states: HostStates = {"torch": torch.random.get_rng_state()}
    if python:
        version, keys, gauss = random.getstate()
        # As a tensor, since 625 numbers one by one take longer to save than a small model.
        states["python"] = version, torch.from_numpy(np.array(keys)), gauss
    if numpy:
        states["numpy"] = plain_numpy_state(np.random.get_state(legacy=True))
    return states


def plain_numpy_state(state: Any) -> tuple[Any, ...]:
    """What NumPy's `get_state` returns, with a tensor instead of its array."""
    kind, keys, position, has_gauss, gauss = state
    return str(kind), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)


def numpy_state(plain: Any) -> tuple[Any, ...]:
    """What NumPy's `set_state` takes, from what `plain_numpy_state` returned."""
    kind, keys, *rest = plain
    return (kind, keys.numpy().astype(np.uint32), *rest)


def set_host_states(states: HostStates) -> None:
    """Put the generators back where `host_states` found them; those it did not read stay where they are."""
    torch.random.set_rng_state(states["torch"])
    if "python" in states:
        version, keys, gauss = states["python"]
        # Earlier checkpoints have them as a tuple.
        random.setstate((version, tuple(np.asarray(keys).tolist()), gauss))
    if "numpy" in states:
        np.random.set_state(numpy_state(states["numpy"]))


def drawn_from(before: HostStates, after: HostStates) -> set[str]:
    """The generators, of those that both states have, that something was drawn from in between."""
    drawn: set[str] = set()
    for name in before.keys() & after.keys():
        is_tuple = isinstance(before[name], tuple)
        for was, now in zip(before[name], after[name], strict=True) if is_tuple else [(before[name], after[name])]:
            # As bytes: tensors lie on the host, and comparing them would look like a read of the device.
            same = was.numpy().tobytes() == now.numpy().tobytes() if isinstance(was, torch.Tensor) else was == now
            if not same:
                drawn.add(name)
    return drawn


class Report(NamedTuple):
    """What a worker says with a batch.

    Parameters:
        worker: the worker's index.
        states: its generators after the batch, pickled: torch would hand each tensor over in its own shared memory.
            None where they stand as at its last report.
        is_padding: there is no batch; it only moves the turn on to the next worker.
        rows: samples of the batch.
    """

    worker: int
    states: bytes | None = None
    is_padding: bool = False
    rows: int = 0


class ReportingCollate:
    """A collator that adds the worker's report to each batch.

    Parameters:
        collate: the loader's own; no samples at all are not handed to it.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]):
        self.collate = collate
        self.reported: HostStates | None = None

    def __call__(self, samples: list[Any]) -> tuple[Any, Report]:
        worker = getattr(get_worker_info(), "id", 0)
        if not samples:
            return None, Report(worker, is_padding=True)
        rows = len(samples) if isinstance(samples, list) else 0
        batch = self.collate(samples)
        states = host_states()
        if self.reported is not None and not drawn_from(self.reported, states):
            return batch, Report(worker, rows=rows)
        self.reported = states
        return batch, Report(worker, pickle.dumps(states), rows=rows)


class ContinuingInit:
    """A `worker_init_fn` that puts the generators of a worker where they stood in an earlier training.

    Parameters:
        own: the loader's own function, called first.
        states: the state of each worker's generators; a worker without any keeps those of a new one.
        has_empty_batches: the worker is given some, for which nothing is to be fetched.
    """

    def __init__(self, own: Callable[[int], None] | None, states: dict[int, HostStates], has_empty_batches: bool):
        self.own, self.states, self.has_empty_batches = own, states, has_empty_batches

    def __call__(self, worker: int) -> None:
        if self.own is not None:
            self.own(worker)
        if worker in self.states:
            set_host_states(self.states[worker])
        dataset: Any = getattr(get_worker_info(), "dataset", None)
        fetch = getattr(dataset, "__getitems__", None)
        if fetch is not None and self.has_empty_batches:
            # Fetching nothing may be an error: neither a transform nor `torch.stack` need bear an empty list.
            vars(dataset)["__getitems__"] = lambda indices: fetch(indices) if indices else []


@dataclass
class WorkerStates:
    """What the workers of a loader have reported so far.

    Parameters:
        latest: each worker's generators after its last batch; nothing for one whose generators nobody drew from.
        before_last: the worker that gave the last batch, and its generators before that; None if there is none.
        given: the worker and the number of samples of each batch since the iteration began, one after the other.
    """

    latest: dict[int, HostStates] = field(default_factory=dict)
    before_last: tuple[int, HostStates | None] | None = None
    given: array[int] = field(default_factory=lambda: array("I"))

    def batches(self, reporting: Iterator[Any]) -> Iterator[Any]:
        """The batches of a loader whose workers report, without their reports."""
        self.given = array("I")
        for answer in reporting:
            report = _report_in(answer)
            if report is None:
                yield answer
            elif not report.is_padding:
                self.before_last = report.worker, self.latest.get(report.worker)
                self.given.extend((report.worker, report.rows))
                if report.states is not None:
                    self.latest[report.worker] = pickle.loads(report.states)
                yield answer[0]

    def before_last_batch(self) -> dict[int, HostStates]:
        """Each worker's generators before the last batch, which is the first one that a resumed training reads."""
        states = dict(self.latest)
        if self.before_last is not None:
            worker, before = self.before_last
            states.pop(worker, None)
            if before is not None:
                states[worker] = before
        return states


def without_reports(answers: Iterator[Any]) -> Iterator[Any]:
    """The batches of a loader, also where its workers were started to report."""
    return WorkerStates().batches(answers)


def _report_in(answer: Any) -> Report | None:
    is_pair = isinstance(answer, (tuple, list)) and len(answer) == 2
    return answer[1] if is_pair and isinstance(answer[1], Report) else None


@contextmanager
def reporting_workers(
    loader: DataLoader, states: dict[int, HostStates], has_empty_batches: bool = False
) -> Iterator[None]:
    """Workers that a loader starts within report on their generators, which begin at the states given.

    Parameters:
        has_empty_batches: the batch sampler gives some, for which nothing is to be fetched.
    """
    own = loader.collate_fn, loader.worker_init_fn
    loader.collate_fn = ReportingCollate(loader.collate_fn)
    if states or has_empty_batches:
        loader.worker_init_fn = ContinuingInit(loader.worker_init_fn, states, has_empty_batches)
    try:
        yield
    finally:
        loader.collate_fn, loader.worker_init_fn = own
