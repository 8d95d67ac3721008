from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from littrainer.data.loaders import LookaheadLoader
from littrainer.data.position import (
    DataProgress,
    ExactStreamState,
    LaterBatches,
    ResumePoint,
    generator_states,
    set_generator_states,
    skips_by_index,
    without_first_batches,
)
from littrainer.data.samplers import EpochSeededSampler
from tests.data.test_loaders import Numbers
from tests.scenarios.data import Stream


def noisy(samples: list[int]) -> tuple[Any, ...]:
    return (*samples, random.random())


def loader_over(count: int) -> LookaheadLoader:
    return LookaheadLoader(Numbers(count), 2, collate_fn=noisy)


def read(batches: Iterator[Any], number: int) -> list[Any]:
    """Read batches, and draw from the generator in between, as dropout does."""
    taken = []
    for _ in range(number):
        taken.append(next(batches))
        random.random()
    return taken


@pytest.mark.parametrize("done", [1, 3, 4])
def test_reading_goes_on_with_the_batches_and_draws_that_were_left(done: int) -> None:
    progress = DataProgress()
    batches = progress.batches(loader_over(10))
    read(batches, done)
    kept, at_checkpoint = progress.state(done, epoch_is_over=False), random.getstate()
    expected = read(batches, 5 - done)

    random.seed(99)
    resumed = DataProgress()
    resumed.point = ResumePoint(done, kept, lambda: random.setstate(at_checkpoint))
    loader = resumed.resumed_loader(loader_over(10))
    assert read(resumed.batches(loader), 5 - done) == expected
    assert loader.dataset.read == list(range(2 * done, 10))


def test_a_generator_that_reading_draws_from_now_and_then_goes_on_where_it_stood() -> None:
    def rarely_noisy(samples: list[int]) -> Any:
        return (*samples, random.random()) if samples[0] in (12, 24) else samples

    def loader() -> LookaheadLoader:
        return LookaheadLoader(Numbers(30), 2, collate_fn=rarely_noisy)

    progress = DataProgress()
    batches = progress.batches(loader())
    for _ in range(9):
        next(batches)
    kept = progress.state(9, epoch_is_over=False)
    expected = list(batches)

    resumed = DataProgress()
    resumed.point = ResumePoint(9, kept, lambda: None)
    assert list(resumed.batches(resumed.resumed_loader(loader()))) == expected


def test_a_loaders_own_generators_go_on_over_an_epochs_end() -> None:
    def loader() -> DataLoader:
        dataset = Numbers(10)
        order = RandomSampler(dataset, generator=torch.Generator().manual_seed(2))
        return DataLoader(dataset, 2, sampler=order, generator=torch.Generator().manual_seed(1))

    first = loader()
    list(first)
    states = generator_states(first)
    assert set(states) == {"loader", "sampler"}
    again = loader()
    set_generator_states(again, states)
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in first]


@pytest.mark.parametrize("kind", [DataLoader, LookaheadLoader])
def test_batches_of_a_mapped_dataset_are_left_out_without_reading_a_sample(kind: Any) -> None:
    dataset = Numbers(10)
    loader = kind(dataset, 3, collate_fn=list, sampler=EpochSeededSampler(dataset, data_seed=1))
    whole = list(loader)
    dataset.read.clear()
    shorter = without_first_batches(loader, 2)
    loader.sampler.set_epoch(0)
    if kind is LookaheadLoader:
        shorter.set_epoch(0)
    assert type(shorter) is kind and len(shorter) == 2
    assert list(shorter) == whole[2:]
    assert dataset.read == [number for batch in whole[2:] for number in batch]


def test_only_the_next_iteration_is_shortened() -> None:
    shorter = without_first_batches(LookaheadLoader(Numbers(6), 2, collate_fn=list), 2)
    assert [list(shorter) for _ in range(2)] == [[[4, 5]], [[0, 1], [2, 3], [4, 5]]]
    assert len(shorter) == 3
    none_left = without_first_batches(LookaheadLoader(Numbers(4), 2), 5)
    assert len(none_left) == 0 and list(none_left) == []


class OtherBatches(DataLoader[Any]):
    """Its batches are not those of its sampler."""

    def __iter__(self) -> Any:
        return iter("abcd")


@pytest.mark.parametrize(
    "loader",
    [OtherBatches(Numbers(4)), LookaheadLoader(Stream([]), 2), DataLoader(Numbers(4), batch_size=None), ["a", "b"]],
    ids=["own iteration", "stream", "no batches", "list"],
)
def test_what_has_no_batch_sampler_that_counts_cannot_be_skipped_by_index(loader: Any) -> None:
    assert not skips_by_index(loader)


@pytest.mark.parametrize(("number", "padding"), [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1)])
def test_empty_batches_let_each_worker_have_the_batches_it_would_have_had(number: int, padding: int) -> None:
    batches = list(LaterBatches(BatchSampler(SequentialSampler(range(12)), 2, drop_last=False), number, turns=3))
    assert batches[:padding] == [[]] * padding
    assert batches[padding][0] == 2 * number


class Tells(IterableDataset[Any]):
    def __init__(self, state: Any = 3) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state

    def __iter__(self) -> Any:
        return iter(())


def test_a_state_that_a_checkpoint_cannot_hold_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    state = ExactStreamState.of(DataLoader(Tells(state={"callback": print})))
    assert state is not None and state.save() is None and state.save() is None
    assert caplog.text.count("Tells.state_dict() holds objects that no checkpoint stores") == 1


@pytest.mark.parametrize("shuffled", [True, False])
def test_a_shuffle_buffer_anywhere_in_a_streamed_dataset_holds_samples_back(shuffled: bool) -> None:
    from datasets import Dataset

    rows = Dataset.from_dict({"x": [1, 2, 3]}).to_iterable_dataset()
    rows = rows.shuffle(buffer_size=2) if shuffled else rows
    loader = DataLoader(rows.map(lambda row: row).filter(lambda row: True))
    assert (ExactStreamState.of(loader) is None) is shuffled
