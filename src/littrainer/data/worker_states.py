"""Where the random number generators of DataLoader workers stand, as they report it with each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from littrainer.data.generators import HostStates, drawn_from, host_states, set_host_states


class Report:
    """What a worker says beside a batch.

    Parameters:
        worker: the worker's index.
        states: its generators after the batch; None where they stand as at its last report.
        is_padding: there is no batch; it only moves the turn on to the next worker.
    """

    def __init__(self, worker: int, states: HostStates | None, is_padding: bool):
        self.worker = worker
        self.is_padding = is_padding
        # Arrays, not tensors: torch would hand each tensor over in shared memory of its own.
        self._states = None if states is None else _converted(states, torch.Tensor, torch.Tensor.numpy)

    @property
    def states(self) -> HostStates | None:
        """The generators' states, as `host_states` gives them."""
        return None if self._states is None else _converted(self._states, np.ndarray, torch.from_numpy)


def _converted(value: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return convert(value)
    if isinstance(value, dict):
        return {name: _converted(item, kind, convert) for name, item in value.items()}
    return tuple(_converted(item, kind, convert) for item in value) if isinstance(value, tuple) else value


class ReportingCollate:
    """A collator that adds the worker's report to each batch.

    Parameters:
        collate: the loader's own; no samples at all are not handed to it.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]):
        self.collate = collate
        self.reported: HostStates | None = None

    def __call__(self, samples: list[Any]) -> tuple[Any, Report]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        if not samples:
            return None, Report(worker, None, is_padding=True)
        batch = self.collate(samples)
        states = host_states()
        if self.reported is not None and not drawn_from(self.reported, states):
            return batch, Report(worker, None, is_padding=False)
        self.reported = states
        return batch, Report(worker, states, is_padding=False)


class UnaskedForNothing:
    """A dataset that fetches batches, around which workers answer by themselves where a batch has no samples.

    Parameters:
        dataset: has `__getitems__`.

    Fetching nothing may be an error: neither a transform nor `torch.stack` need bear an empty list. A worker's fetcher
    alone holds such an object: `ContinuingInit` shows the script's own functions in the worker the dataset itself.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        return self.dataset.__getitems__(indices) if indices else []


class ContinuingInit:
    """A `worker_init_fn` that puts the generators of a worker where they stood in an earlier training.

    Parameters:
        own: the loader's own function, called first.
        states: the state of each worker's generators; a worker without any keeps those of a new one.
    """

    def __init__(self, own: Callable[[int], None] | None, states: dict[int, HostStates]):
        self.own = own
        self.states = states

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, UnaskedForNothing):
            # Where functions of the script's own find the dataset; it refuses plain assignments.
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.own is not None:
            self.own(worker)
        if worker in self.states:
            set_host_states(self.states[worker])


@dataclass
class WorkerStates:
    """What the workers of a loader have reported so far.

    Parameters:
        latest: each worker's generators after its last batch; nothing for one whose generators nobody drew from.
        before_last: the worker that gave the last batch, and its generators before that; None where there is none.
    """

    latest: dict[int, HostStates] = field(default_factory=dict)
    before_last: tuple[int, HostStates | None] | None = None

    def batches(self, reporting: Iterator[Any]) -> Iterator[Any]:
        """The batches of a loader whose workers report, without their reports."""
        for answer in reporting:
            report = _report_in(answer)
            if report is None:
                yield answer
            elif not report.is_padding:
                self.before_last = report.worker, self.latest.get(report.worker)
                if report.states is not None:
                    self.latest[report.worker] = report.states
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
    dataset = loader.dataset
    loader.collate_fn = ReportingCollate(loader.collate_fn)
    is_asked_for_nothing = has_empty_batches and bool(getattr(dataset, "__getitems__", None))
    if is_asked_for_nothing:
        # A DataLoader refuses another dataset once it stands.
        vars(loader)["dataset"] = UnaskedForNothing(dataset)
    if states or is_asked_for_nothing:
        loader.worker_init_fn = ContinuingInit(loader.worker_init_fn, states)
    try:
        yield
    finally:
        loader.collate_fn, loader.worker_init_fn = own
        vars(loader)["dataset"] = dataset
