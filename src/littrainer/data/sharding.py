"""Which part of the data each process reads, shared out as accelerate shares it out.

Either the processes take turns with whole batches (rounds of as many batches as there are processes), or each batch is
split between them. What the last round lacks is filled up with what came first.
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
class Share:
    """One of the parts into which the data is divided.

    Parameters:
        number: which part, from 0 up.
        of: parts in all; processes that compute a layer together have the same part.
        split_batches: the batches of a loader are split; else the processes take turns with whole ones.
        even_batches: what the last round lacks is filled up with the first samples, so that all parts are equal.
    """

    number: int
    of: int
    split_batches: bool = False
    even_batches: bool = True

    def samples_of_round(self, batch_size: int) -> int:
        """Samples that all parts together have of a round.

        Parameters:
            batch_size: samples of one batch of the loader.
        """
        return batch_size if self.split_batches else batch_size * self.of

    def samples_of_part(self, batch_size: int) -> int:
        """Samples that one part has of a round."""
        return batch_size // self.of if self.split_batches else batch_size

    def check_divides(self, batch_size: int | None) -> None:
        """Refuse batches that cannot be split into equal parts.

        Raises:
            ValueError: `split_batches` is set, and the size is unknown or no multiple of the number of parts.
        """
        if self.split_batches and (batch_size is None or batch_size % self.of):
            size = "a batch size that is not known" if batch_size is None else f"a batch size of {batch_size}"
            raise ValueError(
                f"split_batches=True divides each batch between {self.of} processes, and {size} cannot be divided so. "
                f"Choose a multiple of {self.of}, or set split_batches=False in accelerator_config."
            )


def share_of(args: TrainingArguments, settings: Any) -> Share | None:
    """The part of this process; None where it reads everything.

    Parameters:
        settings: has `split_batches` and `even_batches`.
    """
    parts = data_parallel_size(args)
    if parts == 1:
        return None
    return Share(
        number=data_parallel_rank(args),
        of=parts,
        split_batches=bool(getattr(settings, "split_batches", False)),
        even_batches=bool(getattr(settings, "even_batches", True)),
    )


def length_of(sized: Any) -> int | None:
    """The `len()` of a dataset or loader; None where it is not known."""
    try:
        return len(sized)
    except (TypeError, AttributeError, NotImplementedError):
        return None


def tell_epoch(epoch: int, *candidates: Any) -> None:
    """Choose the epoch of samplers and datasets that have one."""
    for candidate in candidates:
        if callable(getattr(candidate, "set_epoch", None)):
            candidate.set_epoch(epoch)


class SharedBatches(Sampler[list[int]]):
    """The batches of a batch sampler that one process reads.

    Parameters:
        batch_sampler: gives the batches of all processes, the same ones in each of them.
        share: the part to read.

    A batch sampler without a `batch_size` may give batches of any size; whole ones of the first round fill up the last.
    With `drop_last` an incomplete last round is left out.

    Raises:
        ValueError: batches are to be split that cannot be.
    """

    def __init__(self, batch_sampler: Any, share: Share):
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
        """Choose the epoch whose order the next iteration has."""
        tell_epoch(epoch, self.batch_sampler, self.sampler)

    def __len__(self) -> int:
        whole, share = len(self.batch_sampler), self.share
        if share.split_batches:
            return whole - self._has_nothing_of_last_batch()
        rounds, left_over = divmod(whole, share.of)
        if not left_over or self.drop_last:
            return rounds
        return rounds + (share.even_batches or share.number < left_over)

    def _has_nothing_of_last_batch(self) -> bool:
        share, samples = self.share, self.sampler
        if share.even_batches or self.drop_last or self.batch_size is None or not hasattr(samples, "__len__"):
            return False
        return 0 < len(samples) % self.batch_size <= share.number * share.samples_of_part(self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        return self._parts_of_batches() if self.share.split_batches else self._turns()

    def _turns(self) -> Iterator[list[int]]:
        share = self.share
        first_round: list[list[int]] = []
        left_over: list[list[int]] = []
        for batches in in_rounds(self.batch_sampler, share.of):
            first_round = first_round or batches
            # Nobody gets a batch of a round before it is certain that everybody gets one.
            is_complete = len(batches) == share.of and self.batch_size in (None, len(batches[-1]))
            left_over = [] if is_complete else batches
            if is_complete:
                yield batches[share.number]
        if left_over and not self.drop_last:
            if share.even_batches:
                left_over = self._filled_up(left_over, first_round)
            yield from left_over[share.number : share.number + 1]

    def _filled_up(self, batches: list[list[int]], first_round: list[list[int]]) -> list[list[int]]:
        """The last round with what it lacks: samples of the first one, or whole batches if these have any size."""
        missing, size = self.share.of - len(batches), self.batch_size
        if size is None:
            return [*batches, *islice(cycle(first_round), missing)]
        filling = cycle(chain.from_iterable(first_round))
        return [[*batch, *islice(filling, size - len(batch))] for batch in [*batches, *([] for _ in range(missing))]]

    def _parts_of_batches(self) -> Iterator[list[int]]:
        assert self.batch_size is not None
        part = self.share.samples_of_part(self.batch_size)
        own = slice(self.share.number * part, (self.share.number + 1) * part)
        first: list[int] = []
        batch: list[int] = []
        for batch in self.batch_sampler:
            first = first or batch
            if len(batch) == self.batch_size:
                yield batch[own]
        if self.drop_last or not first or len(batch) >= self.batch_size:
            return
        if self.share.even_batches:
            batch = [*batch, *islice(cycle(first), self.batch_size - len(batch))]
        if batch[own]:
            yield batch[own]


class SharedStream(IterableDataset[Any]):
    """The samples of a stream that one process reads; each process reads the whole stream.

    Parameters:
        dataset: the same stream in each process.
        batch_size: samples of one batch of the loader.
        share: the part to read.
        drop_last: leave out an incomplete last round; else it is filled up with the first samples.

    Raises:
        ValueError: batches are to be split that cannot be.
    """

    def __init__(self, dataset: Any, batch_size: int, share: Share, drop_last: bool = False):
        share.check_divides(batch_size)
        self.dataset = dataset
        self.batch_size = batch_size
        self.share = share
        self.drop_last = drop_last
        self.epoch = 0
        # Samples of the last round that are not repeated; None until the stream has been read to its end here.
        self.samples_in_last_round: int | None = None

    @property
    def samples_of_round(self) -> int:
        """Samples that all processes together have of a round."""
        return self.share.samples_of_round(self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the stream is read in."""
        self.epoch = epoch
        tell_epoch(epoch, self.dataset)

    def __len__(self) -> int:
        complete, left_over = divmod(len(self.dataset), self.samples_of_round)
        rounds = complete + (left_over > 0 and not self.drop_last)
        return rounds * self.share.samples_of_part(self.batch_size)

    def samples_of_incomplete_round(self) -> int:
        """Samples of the last round that are not repeated; 0 if it is a full one, -1 if unknown."""
        samples = self.samples_in_last_round
        if samples is None:
            # Workers read copies, which keep to themselves what they count.
            samples = length_of(self.dataset)
        return -1 if samples is None or self.drop_last else samples % self.samples_of_round

    def __iter__(self) -> Iterator[Any]:
        # A stream with a generator that is not told of epochs would have another order in each process.
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        part = self.share.samples_of_part(self.batch_size)
        own = slice(self.share.number * part, (self.share.number + 1) * part)
        self.samples_in_last_round = None
        first: list[Any] = []
        length = 0
        for samples in in_rounds(self.dataset, self.samples_of_round):
            first, length = first or samples, len(samples)
            if length == self.samples_of_round:
                yield from samples[own]
            elif not self.drop_last:
                self.samples_in_last_round = length
                yield from [*samples, *islice(cycle(first), self.samples_of_round - length)][own]
        if length == self.samples_of_round:
            self.samples_in_last_round = length


def in_rounds(elements: Iterable[Element], size: int) -> Iterator[list[Element]]:
    """Elements in lists of a size, the last of which may be shorter; drawn only as far as each list needs."""
    iterator = iter(elements)
    while taken := list(islice(iterator, size)):
        yield taken
        if len(taken) < size:
            return
