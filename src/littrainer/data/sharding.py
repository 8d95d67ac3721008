"""The part of the data that each process reads, as under accelerate.

Either the processes take turns with whole batches (rounds of as many batches as there are processes), or each batch is
split between them. An incomplete last round is filled up with the first samples.
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
    """One of the parts into which the data is divided.

    Parameters:
        index: the index of the part.
        count: parts in all; processes that compute a layer together have the same part.
        split_batches: the batches of a loader are split; else the processes take turns with whole batches.
        even_batches: the last round is filled up with the first samples, so that all parts are equal.
    """

    index: int
    count: int
    split_batches: bool = False
    even_batches: bool = True

    def global_batch_size(self, batch_size: int) -> int:
        """Return the samples of a round in all parts together, for a batch size of the loader."""
        return batch_size if self.split_batches else batch_size * self.count

    def local_batch_size(self, batch_size: int) -> int:
        """Return the samples of a round in one part."""
        return batch_size // self.count if self.split_batches else batch_size

    def check_divides(self, batch_size: int | None) -> None:
        """Raise a ValueError if batches are to be split that cannot be split into equal parts."""
        if self.split_batches and (batch_size is None or batch_size % self.count):
            size = "a batch size that is not known" if batch_size is None else f"a batch size of {batch_size}"
            raise ValueError(
                f"split_batches=True divides each batch between {self.count} processes, and {size} cannot be divided "
                f"so. Choose a multiple of {self.count}, or set split_batches=False in accelerator_config."
            )


def find_shard(args: TrainingArguments, settings: Any) -> ShardSpec | None:
    """Return the part of this process, by the `split_batches` and `even_batches` of settings; None if it reads all."""
    parts = data_parallel_size(args)
    if parts == 1:
        return None
    return ShardSpec(
        index=data_parallel_rank(args),
        count=parts,
        split_batches=bool(getattr(settings, "split_batches", False)),
        even_batches=bool(getattr(settings, "even_batches", True)),
    )


def get_length(sized: Any) -> int | None:
    """Return the `len()` of a dataset or loader; None if it is unknown."""
    try:
        return len(sized)
    except (TypeError, AttributeError, NotImplementedError):
        return None


def set_epoch_on(epoch: int, *candidates: Any) -> None:
    """Set the epoch of samplers and datasets that have `set_epoch`."""
    for candidate in candidates:
        if callable(getattr(candidate, "set_epoch", None)):
            candidate.set_epoch(epoch)


class SharedBatches(Sampler[list[int]]):
    """The batches of a batch sampler that one process reads.

    A batch sampler without a `batch_size` may give batches of any size; batches of the first round fill up the last.
    With `drop_last` an incomplete last round is left out.

    Parameters:
        batch_sampler: gives the batches of all processes, the same in each of them.

    Raises:
        ValueError: batches are to be split that cannot be.
    """

    def __init__(self, batch_sampler: Any, share: ShardSpec):
        self.batch_sampler = batch_sampler
        self.share = share
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)
        self.drop_last: bool = getattr(batch_sampler, "drop_last", False)
        share.check_divides(self.batch_size)

    @property
    def sampler(self) -> Any:
        """The order of samples that the batches follow; None if there is none."""
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def even_batches(self) -> bool:
        """Whether all processes get equally many batches; writable."""
        return self.share.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.share = replace(self.share, even_batches=value)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the order."""
        set_epoch_on(epoch, self.batch_sampler, self.sampler)

    def __len__(self) -> int:
        whole, share = len(self.batch_sampler), self.share
        if not share.split_batches:
            rounds, left_over = divmod(whole, share.count)
            is_in_last_round = left_over and not self.drop_last and (share.even_batches or share.index < left_over)
            return rounds + bool(is_in_last_round)
        if share.even_batches or self.drop_last or self.batch_size is None or not hasattr(self.sampler, "__len__"):
            return whole
        # This process may have nothing of the last batch.
        rows = len(self.sampler) % self.batch_size
        return whole - (0 < rows <= share.index * share.local_batch_size(self.batch_size))

    def __iter__(self) -> Iterator[list[int]]:
        share, size = self.share, self.batch_size
        rounds: Iterable[list[list[int]]] = iterate_chunks(self.batch_sampler, share.count)
        if share.split_batches and size is not None:
            size = part = share.local_batch_size(size)
            rounds = (list(iterate_chunks(batch, part)) for batch in self.batch_sampler)
        first_round: list[list[int]] = []
        left_over: list[list[int]] = []
        for batches in rounds:
            first_round = first_round or batches
            # No process gets a batch of a round before it is certain that all processes get one.
            is_complete = len(batches) == share.count and size in (None, len(batches[-1]))
            left_over = [] if is_complete else batches
            if is_complete:
                yield batches[share.index]
        if left_over and not self.drop_last:
            if share.even_batches:
                left_over = self._fill_up(left_over, first_round, size)
            yield from left_over[share.index : share.index + 1]

    def _fill_up(self, batches: list[list[int]], first_round: list[list[int]], size: int | None) -> list[list[int]]:
        # With samples of the first round, or with whole batches if these have any size.
        missing = self.share.count - len(batches)
        if size is None:
            return [*batches, *islice(cycle(first_round), missing)]
        filling = cycle(chain.from_iterable(first_round))
        return [[*batch, *islice(filling, size - len(batch))] for batch in [*batches, *([] for _ in range(missing))]]


class SharedStream(IterableDataset[Any]):
    """One process's samples of a stream, which each process reads to its end.

    Parameters:
        dataset: the same stream in each process.
        batch_size: samples of one batch of the loader.
        drop_last: leave out an incomplete last round; else it is filled up with the first samples.

    Raises:
        ValueError: batches are to be split that cannot be.
    """

    def __init__(self, dataset: Any, batch_size: int, share: ShardSpec, drop_last: bool = False):
        share.check_divides(batch_size)
        self.dataset = dataset
        self.batch_size = batch_size
        self.share = share
        self.drop_last = drop_last
        self.epoch = 0
        # Samples of the last round that are not repeated; None until the stream has been read to its end here.
        self.last_global_batch_size: int | None = None

    @property
    def global_batch_size(self) -> int:
        """Samples of a round in all processes together."""
        return self.share.global_batch_size(self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the stream."""
        self.epoch = epoch
        set_epoch_on(epoch, self.dataset)

    def __len__(self) -> int:
        complete, left_over = divmod(len(self.dataset), self.global_batch_size)
        rounds = complete + (left_over > 0 and not self.drop_last)
        return rounds * self.share.local_batch_size(self.batch_size)

    def incomplete_global_batch_size(self) -> int:
        """Return the samples of the last round that are not repeated; 0 if it is full, -1 if unknown."""
        samples = self.last_global_batch_size
        if samples is None:
            # Workers count in their copies.
            samples = get_length(self.dataset)
        return -1 if samples is None or self.drop_last else samples % self.global_batch_size

    def __iter__(self) -> Iterator[Any]:
        # A generator that depends on no epoch would give another order in each process.
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        part = self.share.local_batch_size(self.batch_size)
        own = slice(self.share.index * part, (self.share.index + 1) * part)
        self.last_global_batch_size = None
        first: list[Any] = []
        length = 0
        for samples in iterate_chunks(self.dataset, self.global_batch_size):
            first, length = first or samples, len(samples)
            if length == self.global_batch_size:
                yield from samples[own]
            elif not self.drop_last:
                self.last_global_batch_size = length
                yield from [*samples, *islice(cycle(first), self.global_batch_size - length)][own]
        if length == self.global_batch_size:
            self.last_global_batch_size = length


def iterate_chunks(elements: Iterable[Element], size: int) -> Iterator[list[Element]]:
    """Yield elements in lists of a size, the last of which may be shorter; none is drawn in advance."""
    iterator = iter(elements)
    while taken := list(islice(iterator, size)):
        yield taken
        if len(taken) < size:
            return
