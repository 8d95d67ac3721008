"""Shards of the data, compared with accelerate's classes."""

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


def make_shards(count: int, size: int, drop_last: bool, count_shards: int, **options: Any) -> list[SharedBatches]:
    sampler = BatchSampler(range(count), size, drop_last)
    return [SharedBatches(sampler, ShardSpec(number, count_shards, **options)) for number in range(count_shards)]


@given(COUNTS, PARTS, SIZES, st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_each_shard_of_batches_equals_accelerates(
    count: int, count_shards: int, size: int, drop_last: bool, even: bool, split: bool
) -> None:
    size = size * count_shards if split else size
    theirs = BatchSampler(range(count), size, drop_last)
    for number, ours in enumerate(
        make_shards(count, size, drop_last, count_shards, split_batches=split, even_batches=even)
    ):
        shard = BatchSamplerShard(theirs, count_shards, number, split_batches=split, even_batches=even)
        assert list(ours) == [batch for batch in shard if batch]
        if even:
            assert len(ours) == len(shard)
        assert len(list(ours)) == len(ours)


class AnySizes:
    """Batches of given sizes, without a `batch_size`."""

    def __init__(self, sizes: list[int], drop_last: bool):
        self.sizes = sizes
        self.drop_last = drop_last

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(10 * index, 10 * index + size)) for index, size in enumerate(self.sizes)])


@given(st.lists(SIZES, max_size=12), PARTS, st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_batches_of_any_size_are_sharded_as_by_accelerate(
    sizes: list[int], count_shards: int, drop_last: bool, even: bool
) -> None:
    sampler: Any = AnySizes(sizes, drop_last)
    for number in range(count_shards):
        ours = SharedBatches(sampler, ShardSpec(number, count_shards, even_batches=even))
        theirs = BatchSamplerShard(sampler, count_shards, number, even_batches=even)
        assert list(ours) == list(theirs) and len(ours) == len(theirs) == len(list(ours))


class Counting(IterableDataset[int]):
    """Stream of numbers, with an optional generator that shifts them."""

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
def test_each_shard_of_a_stream_equals_accelerates(
    count: int, count_shards: int, size: int, drop_last: bool, split: bool
) -> None:
    size = size * count_shards if split else size
    for number in range(count_shards):
        ours = SharedStream(Counting(count), size, ShardSpec(number, count_shards, split_batches=split), drop_last)
        theirs = IterableDatasetShard(Counting(count), size, drop_last, count_shards, number, split_batches=split)
        assert list(ours) == list(theirs)
        # accelerate ignores `split_batches` in the length.
        assert len(ours) == len(list(ours)) and (split or len(ours) == len(theirs))


def test_a_stream_counts_its_last_samples_without_padding() -> None:
    for count, expected in ((10, 2), (8, 4), (12, 4), (3, 3)):
        stream = SharedStream(Counting(count), 2, ShardSpec(1, 2))
        assert stream.last_global_batch_size is None
        list(stream)
        assert stream.last_global_batch_size == expected
        assert stream.incomplete_global_batch_size() == expected % 4
    # Workers read copies.
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


def test_even_batches_can_be_changed_later() -> None:
    last = make_shards(5, 2, False, 2)[1]
    assert len(list(last)) == len(last) == 2
    last.even_batches = False
    assert len(list(last)) == len(last) == 1 and last.even_batches is False


def test_chunks_are_drawn_without_prefetch() -> None:
    source = iter(range(10))
    chunks = iterate_chunks(source, 3)
    assert next(chunks) == [0, 1, 2] and next(source) == 3
    assert list(chunks) == [[4, 5, 6], [7, 8, 9]]
