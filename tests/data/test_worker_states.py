from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from littrainer.data.loaders import LookaheadLoader
from littrainer.data.position import without_first_batches
from littrainer.data.workers import (
    WorkerStates,
    host_states,
    reporting_workers,
    without_reports,
)
from tests.data.test_loaders import Numbers


def drawing(samples: list[Any]) -> list[Any]:
    return [*samples, random.random(), torch.rand(1).item()]


def test_other_pairs_than_reports_are_batches() -> None:
    pairs: list[Any] = [("x", "y"), [1, 2]]
    assert list(without_reports(iter(pairs))) == pairs


def test_a_worker_goes_on_from_the_states_it_is_given() -> None:
    loader = DataLoader(Numbers(4), 1, collate_fn=drawing, num_workers=1)
    workers = WorkerStates()
    with reporting_workers(loader, {}):
        batches = workers.batches(iter(loader))
    expected = list(batches)[3]
    again = DataLoader(Numbers(4), 1, sampler=[3], collate_fn=drawing, num_workers=1)
    with reporting_workers(again, workers.before_last_batch()):
        answers = iter(again)
    assert list(without_reports(answers)) == [expected]


def test_a_loader_whose_workers_report_and_live_on_still_gives_plain_batches() -> None:
    class Watch:
        def begin(self, loader: Any, make_iterator: Any) -> Any:
            with reporting_workers(loader, {}):
                return without_reports(make_iterator())

        def before_batch_ahead(self) -> None: ...

        def after_batch_ahead(self, is_one: bool) -> None: ...

    loader = LookaheadLoader(Numbers(3), 1, collate_fn=list, num_workers=1, persistent_workers=True)
    assert list(loader.read(Watch())) == list(loader) == [[0], [1], [2]]


class Noisy(Numbers):
    """To whose samples workers add what `worker_init_fn` has set; `dataset` is what many wrappers call theirs."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.noise = 0
        self.dataset = None

    def __getitems__(self, indices: list[int]) -> list[int]:
        assert indices, "asked for nothing"
        return [index + self.noise for index in indices]


def set_noise(worker: int) -> None:
    get_worker_info().dataset.noise = 100 * (1 + worker)  # type: ignore[union-attr, attr-defined]


@pytest.mark.parametrize("states", [{}, {1: host_states()}])
def test_what_the_scripts_function_sets_on_a_workers_dataset_counts_where_batches_are_left_out(states: Any) -> None:
    loader = LookaheadLoader(Noisy(6), 1, collate_fn=list, num_workers=2, worker_init_fn=set_noise)
    later = without_first_batches(loader, 3, keeps_turns=True)
    with reporting_workers(later, states, has_empty_batches=True):
        answers = DataLoader.__iter__(later)
    assert list(without_reports(answers)) == list(loader)[3:] == [[203], [104], [205]]
