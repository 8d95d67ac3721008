"""The random number generators of a DataLoader's workers, which report their states with their batches."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from littrainer.data.resume.rng import (
    decode_rng_states,
    encode_rng_states,
    find_advanced_generators,
    get_rng_states,
    set_rng_states,
)

# A worker's index -> the states of its generators, in portable form.
StatesByWorker = dict[int, dict[str, Any]]


class WorkerReport(NamedTuple):
    """The record that a worker sends with a batch.

    Parameters:
        worker: the worker's index.
        states: its generators after the batch, pickled: torch would send each tensor in its own shared memory. None if
            they are as at its last report.
        is_padding: there is no batch; the turn goes to the next worker.
        rows: samples of the batch.
    """

    worker: int
    states: bytes | None = None
    is_padding: bool = False
    rows: int = 0


class ReportingCollator:
    """A collator that adds the worker's report to each batch.

    Parameters:
        collate: the loader's own; it is not called without samples.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]):
        self.collate = collate
        self.reported: dict[str, Any] | None = None

    def __call__(self, samples: list[Any]) -> tuple[Any, WorkerReport]:
        worker = getattr(get_worker_info(), "id", 0)
        if not samples:
            return None, WorkerReport(worker, is_padding=True)
        rows = len(samples) if isinstance(samples, list) else 0
        batch = self.collate(samples)
        states = get_rng_states(gpu=False)
        if self.reported is not None and not find_advanced_generators(self.reported, states):
            return batch, WorkerReport(worker, rows=rows)
        self.reported = states
        return batch, WorkerReport(worker, pickle.dumps(encode_rng_states(states)), rows=rows)


class ResumedWorkerInit:
    """A `worker_init_fn` that restores the generators of a worker from an earlier training.

    Parameters:
        own: the loader's own function, called first.
        states: the states by worker; a worker without any keeps those of a new one.
        has_empty_batches: the worker gets empty batches, for which nothing must be fetched.
    """

    def __init__(self, own: Callable[[int], None] | None, states: StatesByWorker, has_empty_batches: bool):
        self.own = own
        self.states = states
        self.has_empty_batches = has_empty_batches

    def __call__(self, worker: int) -> None:
        if self.own is not None:
            self.own(worker)
        if worker in self.states:
            set_rng_states(decode_rng_states(self.states[worker]))
        dataset: Any = getattr(get_worker_info(), "dataset", None)
        fetch = getattr(dataset, "__getitems__", None)
        if fetch is not None and self.has_empty_batches:
            # Neither a transform nor `torch.stack` need accept an empty list.
            vars(dataset)["__getitems__"] = lambda indices: fetch(indices) if indices else []


@dataclass
class WorkerStates:
    """The reports of a loader's workers so far.

    Parameters:
        latest: each worker's generators after its last batch; nothing for a worker that drew from none.
        received: the worker and the number of samples of each batch since the iteration began, in turn.
    """

    latest: StatesByWorker = field(default_factory=dict)
    received: array[int] = field(default_factory=lambda: array("I"))

    def batches(self, reporting: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a loader whose workers report, without their reports."""
        self.received = array("I")
        for item in reporting:
            is_pair = isinstance(item, (tuple, list)) and len(item) == 2
            if not is_pair or not isinstance(item[1], WorkerReport):
                yield item
                continue
            batch, report = item
            if not report.is_padding:
                self.received.extend((report.worker, report.rows))
                if report.states is not None:
                    self.latest[report.worker] = pickle.loads(report.states)
                yield batch


def remove_reports(items: Iterator[Any]) -> Iterator[Any]:
    """Return the batches of a loader, also if its workers were started to report."""
    return WorkerStates().batches(items)
