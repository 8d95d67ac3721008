"""Random number generator states of DataLoader workers, which report them with their batches."""

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

# Worker index -> encoded generator states.
StatesByWorker = dict[int, dict[str, Any]]


class WorkerReport(NamedTuple):
    """Record that a worker sends with a batch.

    Parameters:
        states: generator states after the batch; None if unchanged since the last report. Pickled, since torch would
            send each tensor in its own shared memory.
    """

    worker: int
    states: bytes | None = None
    is_padding: bool = False
    rows: int = 0


class ReportingCollator:
    """Collator that returns each batch with a worker report."""

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
    """Function for `worker_init_fn` that restores a worker's generators from an earlier training.

    Parameters:
        states: states by worker; a worker without states keeps the initial states.
        has_empty_batches: the worker also gets empty batches, for which the dataset is not called.
    """

    def __init__(self, init_fn: Callable[[int], None] | None, states: StatesByWorker, has_empty_batches: bool):
        self.init_fn = init_fn
        self.states = states
        self.has_empty_batches = has_empty_batches

    def __call__(self, worker: int) -> None:
        if self.init_fn is not None:
            self.init_fn(worker)
        if worker in self.states:
            set_rng_states(decode_rng_states(self.states[worker]))
        dataset: Any = getattr(get_worker_info(), "dataset", None)
        fetch = getattr(dataset, "__getitems__", None)
        if fetch is not None and self.has_empty_batches:
            # Transforms and `torch.stack` may reject an empty list.
            vars(dataset)["__getitems__"] = lambda indices: fetch(indices) if indices else []


@dataclass
class WorkerStates:
    """Latest reports of a loader's workers.

    Parameters:
        received: worker and sample count of each batch of this iteration, alternating.
    """

    latest: StatesByWorker = field(default_factory=dict)
    received: array[int] = field(default_factory=lambda: array("I"))

    def batches(self, reporting: Iterator[Any]) -> Iterator[Any]:
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
