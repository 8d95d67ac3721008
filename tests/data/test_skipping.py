from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from littrainer.data.loaders import LookaheadLoader
from littrainer.data.position import LaterBatches, skips_by_index, without_first_batches
from littrainer.data.samplers import BatchRebalanceSampler, EpochSeededSampler
from tests.data.test_loaders import Numbers
from tests.scenarios.data import Stream


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


def test_a_shortened_loader_keeps_how_its_batches_are_made_and_what_epoch_they_are_told() -> None:
    dataset = Numbers(10)
    loader = LookaheadLoader(
        dataset, 3, collate_fn=tuple, num_workers=1, prefetch_factor=4, sampler=EpochSeededSampler(dataset, data_seed=1)
    )
    shorter = without_first_batches(loader, 1)
    assert (shorter.collate_fn, shorter.num_workers, shorter.prefetch_factor) == (tuple, 1, 4)
    assert shorter.samples_in_last_batch(None) == 1
    shorter.set_epoch(6)
    assert loader.sampler.epoch == 6


def test_leaving_out_more_batches_than_there_are_leaves_none() -> None:
    shorter = without_first_batches(LookaheadLoader(Numbers(4), 2), 5)
    assert len(shorter) == 0 and list(shorter) == []


def test_only_the_next_iteration_is_shortened() -> None:
    shorter = without_first_batches(LookaheadLoader(Numbers(6), 2, collate_fn=list), 2)
    assert [list(shorter) for _ in range(2)] == [[[4, 5]], [[0, 1], [2, 3], [4, 5]]]
    assert len(shorter) == 3


def test_a_loader_class_of_the_scripts_own_is_shortened_without_being_constructed_anew() -> None:
    class Named(DataLoader[Any]):
        def __init__(self, name: str) -> None:
            super().__init__(Numbers(6), 2, collate_fn=list)
            self.name = name

    shorter = without_first_batches(Named("mine"), 1)
    assert isinstance(shorter, Named) and shorter.name == "mine"
    assert list(shorter) == [[2, 3], [4, 5]]


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


def test_the_split_of_skipped_optimizer_steps_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = BatchRebalanceSampler(range(1, 25), effective_batch_size=6, dp_size=1, grad_accum=2)
    whole = list(sampler)
    split: list[Any] = []
    compute = sampler._micro_batches
    monkeypatch.setattr(sampler, "_micro_batches", lambda samples: split.append(samples) or compute(samples))
    assert list(LaterBatches(sampler, 5)) == whole[5:]
    assert len(split) == 2


@pytest.mark.parametrize("kind", [DataLoader, LookaheadLoader])
def test_workers_are_handed_no_empty_batch_where_nobody_takes_it_out_again(kind: Any) -> None:
    shorter = without_first_batches(kind(Numbers(8), 2, num_workers=2), 1)
    assert [batch.tolist() for batch in shorter] == [[2, 3], [4, 5], [6, 7]]
