"""Shares of the data, held against accelerate's own classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, IterableDataset

from littrainer.data.sharding import ShardSpec, SharedBatches, SharedStream, iterate_chunks

COUNTS = st.integers(0, 40)
PARTS = st.integers(2, 5)
SIZES = st.integers(1, 6)


def batches_of_all(count: int, size: int, drop_last: bool, parts: int, **how: Any) -> list[SharedBatches]:
    sampler = BatchSampler(range(count), size, drop_last)
    return [SharedBatches(sampler, ShardSpec(number, parts, **how)) for number in range(parts)]


@given(COUNTS, PARTS, SIZES, st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_each_part_of_the_batches_is_that_of_accelerate(
    count: int, parts: int, size: int, drop_last: bool, even: bool, split: bool
) -> None:
    size = size * parts if split else size
    theirs = BatchSampler(range(count), size, drop_last)
    for number, ours in enumerate(
        batches_of_all(count, size, drop_last, parts, split_batches=split, even_batches=even)
    ):
        shard = BatchSamplerShard(theirs, parts, number, split_batches=split, even_batches=even)
        assert list(ours) == [batch for batch in shard if batch]
        if even:
            assert len(ours) == len(shard)
        assert len(list(ours)) == len(ours)


class AnySizes:
    """Batches of the sizes given, without a `batch_size`."""

    def __init__(self, sizes: list[int], drop_last: bool):
        self.sizes = sizes
        self.drop_last = drop_last

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(10 * place, 10 * place + size)) for place, size in enumerate(self.sizes)])


@given(st.lists(SIZES, max_size=12), PARTS, st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_batches_of_any_size_are_shared_as_by_accelerate(
    sizes: list[int], parts: int, drop_last: bool, even: bool
) -> None:
    sampler: Any = AnySizes(sizes, drop_last)
    for number in range(parts):
        ours = SharedBatches(sampler, ShardSpec(number, parts, even_batches=even))
        theirs = BatchSamplerShard(sampler, parts, number, even_batches=even)
        assert list(ours) == list(theirs) and len(ours) == len(theirs) == len(list(ours))


class Counting(IterableDataset[int]):
    """The numbers up to a count; with a length, and a generator that shifts them all, where asked for."""

    def __init__(self, count: int, generator: torch.Generator | None = None):
        self.count = count
        if generator is not None:
            self.generator = generator

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        generator = getattr(self, "generator", None)
        shift = 0 if generator is None else int(torch.randint(1000, (), generator=generator))
        return iter(range(shift, shift + self.count))


@given(COUNTS, PARTS, SIZES, st.booleans(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_each_part_of_a_stream_is_that_of_accelerate(
    count: int, parts: int, size: int, drop_last: bool, split: bool
) -> None:
    size = size * parts if split else size
    for number in range(parts):
        ours = SharedStream(Counting(count), size, ShardSpec(number, parts, split_batches=split), drop_last)
        theirs = IterableDatasetShard(Counting(count), size, drop_last, parts, number, split_batches=split)
        assert list(ours) == list(theirs)
        # accelerate counts a stream whose batches are split as one whose batches are not.
        assert len(ours) == len(list(ours)) and (split or len(ours) == len(theirs))


def test_a_stream_knows_how_many_of_its_last_samples_are_no_repetitions() -> None:
    for count, expected in ((10, 2), (8, 4), (12, 4), (3, 3)):
        stream = SharedStream(Counting(count), 2, ShardSpec(1, 2))
        assert stream.last_global_batch_size is None
        list(stream)
        assert stream.last_global_batch_size == expected
        assert stream.incomplete_global_batch_size() == expected % 4


def test_where_workers_read_a_stream_its_length_says_how_many_samples_come_last() -> None:
    assert SharedStream(Counting(10), 2, ShardSpec(1, 2)).incomplete_global_batch_size() == 2
    assert SharedStream(Counting(10), 2, ShardSpec(1, 2), drop_last=True).incomplete_global_batch_size() == -1
    assert SharedStream(iter(range(10)), 2, ShardSpec(1, 2)).incomplete_global_batch_size() == -1


def test_a_generator_of_a_stream_is_seeded_by_the_epoch() -> None:
    def numbers(epoch: int, seed: int) -> list[int]:
        stream = SharedStream(Counting(4, torch.Generator().manual_seed(seed)), 2, ShardSpec(0, 2))
        stream.set_epoch(epoch)
        return list(stream)

    theirs = IterableDatasetShard(Counting(4, torch.Generator().manual_seed(1)), 2, False, 2, 0)
    theirs.set_epoch(3)
    assert numbers(3, seed=1) == numbers(3, seed=2) == list(theirs) != numbers(4, seed=1)


def test_batches_that_cannot_be_split_equally_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="between 2 processes, and a batch size of 3 cannot"):
        SharedBatches(BatchSampler(range(9), 3, False), ShardSpec(0, 2, split_batches=True))
    with pytest.raises(ValueError, match="a batch size that is not known"):
        SharedBatches(AnySizes([2, 2], False), ShardSpec(0, 2, split_batches=True))
    with pytest.raises(ValueError, match="split_batches=False"):
        SharedStream(Counting(9), 5, ShardSpec(0, 2, split_batches=True))


def test_whether_batches_are_even_can_be_changed_afterwards() -> None:
    last = batches_of_all(5, 2, False, 2)[1]
    assert len(list(last)) == len(last) == 2
    last.even_batches = False
    assert len(list(last)) == len(last) == 1 and last.even_batches is False


def test_no_more_is_drawn_than_a_round_needs() -> None:
    source = iter(range(10))
    rounds = iterate_chunks(source, 3)
    assert next(rounds) == [0, 1, 2] and next(source) == 3
    assert list(rounds) == [[4, 5, 6], [7, 8, 9]]
