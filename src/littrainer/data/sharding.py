"""Shards of the data for the processes, as under accelerate.

A global batch is either one batch for each process, or one batch that is split between the processes. An incomplete
last global batch is padded with the first samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.data import IterableDataset, Sampler

from littrainer.distributed.layout import data_parallel_rank, data_parallel_size

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

Element = TypeVar("Element")


@dataclass(frozen=True)
class ShardSpec:
    """Specification of a process's shard of the data.

    Parameters:
        count: number of shards; tensor-parallel processes share a shard.
        split_batches: split each batch; else the processes take turns with batches.
        even_batches: pad the last global batch.
    """

    index: int
    count: int
    split_batches: bool = False
    even_batches: bool = True

    def global_batch_size(self, batch_size: int) -> int:
        return batch_size if self.split_batches else batch_size * self.count

    def local_batch_size(self, batch_size: int) -> int:
        return batch_size // self.count if self.split_batches else batch_size

    def check_divides(self, batch_size: int | None) -> None:
        if self.split_batches and (batch_size is None or batch_size % self.count):
            size = "a batch size that is not known" if batch_size is None else f"a batch size of {batch_size}"
            raise ValueError(
                f"split_batches=True divides each batch between {self.count} processes, and {size} cannot be divided "
                f"so. Choose a multiple of {self.count}, or set split_batches=False in accelerator_config."
            )


def find_shard(args: TrainingArguments, settings: Any) -> ShardSpec | None:
    """Return this process's shard; None if the process reads all data."""
    count = data_parallel_size(args)
    if count == 1:
        return None
    return ShardSpec(
        index=data_parallel_rank(args),
        count=count,
        split_batches=bool(getattr(settings, "split_batches", False)),
        even_batches=bool(getattr(settings, "even_batches", True)),
    )


def get_length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, AttributeError, NotImplementedError):
        return None


def set_epoch_on(epoch: int, *candidates: Any) -> None:
    for candidate in candidates:
        if callable(getattr(candidate, "set_epoch", None)):
            candidate.set_epoch(epoch)


class SharedBatches(Sampler[list[int]]):
    """Batch sampler of this process's shard.

    Parameters:
        batch_sampler: batches of all processes, in equal order. Without a `batch_size` the last global batch is padded
            with complete batches.
    """

    def __init__(self, batch_sampler: Any, shard: ShardSpec):
        self.batch_sampler = batch_sampler
        self.shard = shard
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)
        self.drop_last: bool = getattr(batch_sampler, "drop_last", False)
        shard.check_divides(self.batch_size)

    @property
    def sampler(self) -> Any:
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def even_batches(self) -> bool:
        return self.shard.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.shard = replace(self.shard, even_batches=value)

    def set_epoch(self, epoch: int) -> None:
        set_epoch_on(epoch, self.batch_sampler, self.sampler)

    def __len__(self) -> int:
        total, shard = len(self.batch_sampler), self.shard
        if not shard.split_batches:
            complete, remainder = divmod(total, shard.count)
            has_last = remainder and not self.drop_last and (shard.even_batches or shard.index < remainder)
            return complete + bool(has_last)
        if shard.even_batches or self.drop_last or self.batch_size is None or not hasattr(self.sampler, "__len__"):
            return total
        # The last batch may have no rows for this process.
        rows = len(self.sampler) % self.batch_size
        return total - (0 < rows <= shard.index * shard.local_batch_size(self.batch_size))

    def __iter__(self) -> Iterator[list[int]]:
        shard, size = self.shard, self.batch_size
        global_batches: Iterable[list[list[int]]] = iterate_chunks(self.batch_sampler, shard.count)
        if shard.split_batches and size is not None:
            size = local_size = shard.local_batch_size(size)
            global_batches = (list(iterate_chunks(batch, local_size)) for batch in self.batch_sampler)
        first: list[list[int]] = []
        incomplete: list[list[int]] = []
        for batches in global_batches:
            first = first or batches
            # Yield only if every process gets a batch.
            is_complete = len(batches) == shard.count and size in (None, len(batches[-1]))
            incomplete = [] if is_complete else batches
            if is_complete:
                yield batches[shard.index]
        if incomplete and not self.drop_last:
            if shard.even_batches:
                incomplete = self._pad(incomplete, first, size)
            yield from incomplete[shard.index : shard.index + 1]

    def _pad(self, batches: list[list[int]], first: list[list[int]], size: int | None) -> list[list[int]]:
        missing = self.shard.count - len(batches)
        if size is None:
            return [*batches, *islice(cycle(first), missing)]
        samples = cycle(chain.from_iterable(first))
        return [[*batch, *islice(samples, size - len(batch))] for batch in [*batches, *([] for _ in range(missing))]]


class SharedStream(IterableDataset[Any]):
    """Shard of a stream that each process reads completely.

    Parameters:
        drop_last: drop an incomplete last global batch; else pad it.
    """

    def __init__(self, dataset: Any, batch_size: int, shard: ShardSpec, drop_last: bool = False):
        shard.check_divides(batch_size)
        self.dataset = dataset
        self.batch_size = batch_size
        self.shard = shard
        self.drop_last = drop_last
        self.epoch = 0
        # Samples of the last global batch without padding; None until the stream has ended.
        self.last_global_batch_size: int | None = None

    @property
    def global_batch_size(self) -> int:
        return self.shard.global_batch_size(self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        set_epoch_on(epoch, self.dataset)

    def __len__(self) -> int:
        complete, remainder = divmod(len(self.dataset), self.global_batch_size)
        return (complete + (remainder > 0 and not self.drop_last)) * self.shard.local_batch_size(self.batch_size)

    def incomplete_global_batch_size(self) -> int:
        """Return the samples of the last global batch without padding; 0 if it is full, -1 if unknown."""
        samples = self.last_global_batch_size
        if samples is None:
            # Workers count in their copies.
            samples = get_length(self.dataset)
        return -1 if samples is None or self.drop_last else samples % self.global_batch_size

    def __iter__(self) -> Iterator[Any]:
        # Seeded by epoch, so that all processes draw the same order.
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        local_size, global_size = self.shard.local_batch_size(self.batch_size), self.global_batch_size
        local_rows = slice(self.shard.index * local_size, (self.shard.index + 1) * local_size)
        self.last_global_batch_size = None
        first: list[Any] = []
        length = 0
        for samples in iterate_chunks(self.dataset, global_size):
            first = first or samples
            length = len(samples)
            if length == global_size:
                yield from samples[local_rows]
            elif not self.drop_last:
                self.last_global_batch_size = length
                yield from [*samples, *islice(cycle(first), global_size - length)][local_rows]
        if length == global_size:
            self.last_global_batch_size = length


def iterate_chunks(elements: Iterable[Element], size: int) -> Iterator[list[Element]]:
    """Yield lists of elements, without prefetch; the last list may be shorter."""
    iterator = iter(elements)
    while chunk := list(islice(iterator, size)):
        yield chunk
        if len(chunk) < size:
            return
