"""The order in which samples are drawn."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import RandomSampler, Sampler

from littrainer.data.arrow_lengths import list_lengths, whole_numbers_of
from littrainer.distributed.agreement import from_each

logger = logging.getLogger(__name__)

# Batches that are sorted by length together: fewer where the data would make fewer than so many groups.
MOST_BATCHES_SORTED_TOGETHER = 50
FEWEST_SORTED_GROUPS = 4


class EpochSeededSampler(RandomSampler):
    """A random sampler whose order depends on a seed and the epoch only.

    Parameters:
        data_seed: the seed; None takes the seed torch's global generator was last given.

    The order of epoch `e` is that of a generator seeded with `data_seed + e`, as accelerate's seedable sampler has it.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    @classmethod
    def replacing(cls, sampler: RandomSampler, data_seed: int | None) -> EpochSeededSampler:
        """The same draws (replacement, number, generator) as another random sampler makes, but seeded by epoch."""
        return cls(
            sampler.data_source,
            replacement=sampler.replacement,
            num_samples=sampler._num_samples,
            generator=sampler.generator,
            data_seed=data_seed,
        )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.epoch += 1


def get_length_grouped_indices(
    lengths: Sequence[int],
    batch_size: int,
    mega_batch_mult: int | None = None,
    generator: torch.Generator | None = None,
) -> list[int]:
    """A random order in which samples of similar length stand together, and the longest one first.

    Parameters:
        lengths: the length of each sample, in tokens.
        batch_size: samples of a batch.
        mega_batch_mult: batches that are shuffled into a group and sorted there; by default 50, or fewer so that a
            small dataset has four groups.
        generator: draws the order; torch's global one by default.

    The longest sample comes first so that running out of memory happens at once and not after hours.
    """
    if mega_batch_mult is None:
        mega_batch_mult = max(1, min(MOST_BATCHES_SORTED_TOGETHER, len(lengths) // (batch_size * FEWEST_SORTED_GROUPS)))
    shuffled = torch.randperm(len(lengths), generator=generator).tolist()
    group_size = mega_batch_mult * batch_size
    groups = [
        sorted(shuffled[start : start + group_size], key=lengths.__getitem__, reverse=True)
        for start in range(0, len(shuffled), group_size)
    ]
    if not groups:
        return []
    longest = max(range(len(groups)), key=lambda number: lengths[groups[number][0]])
    groups[0][0], groups[longest][0] = groups[longest][0], groups[0][0]
    return [index for group in groups for index in group]


def sample_lengths(dataset: Any, model_input_name: str | None = None) -> list[int]:
    """The length of each sample's main input.

    Parameters:
        dataset: map-style, with mappings as samples.
        model_input_name: the key whose value is measured; `"input_ids"` by default.

    Those of a `datasets.Dataset` are read from its table, where that tells them.

    Raises:
        ValueError: samples are no mappings, or have no such key.
    """
    name = "input_ids" if model_input_name is None else model_input_name
    in_table = list_lengths(dataset, name)
    if in_table is not None:
        return in_table.tolist()
    # Read twice, as transformers does, so that a dataset that draws random numbers in reading stays in step with it.
    first = dataset[0]
    if not isinstance(first, Mapping) or name not in dataset[0]:
        found = f"the keys {', '.join(map(str, first))}" if isinstance(first, Mapping) else f"a {type(first).__name__}"
        raise ValueError(
            f"Samples are ordered by the length of their {name!r}, and the first one is {found}. Add {name!r} to the "
            "samples, name a column of lengths in length_column_name (a datasets.Dataset), or choose another "
            "train_sampling_strategy."
        )
    # One by one, also where batches of samples could be fetched: samples may be padded to the others of their batch.
    samples = dataset if hasattr(type(dataset), "__iter__") else (dataset[index] for index in range(len(dataset)))
    return [len(sample[name]) for sample in samples]


class LengthGroupedSampler(Sampler[int]):
    """Draws samples in a random order that puts those of similar length together, so that batches need less padding.

    Parameters:
        batch_size: samples of a batch, or of all micro-batches of an optimizer step.
        dataset: measured where `lengths` is not given.
        lengths: the length of each sample, in tokens.
        model_input_name: the key of the samples that is measured; `"input_ids"` by default.
        generator: draws the order; torch's global one by default.

    Raises:
        ValueError: neither dataset nor lengths is given, or the dataset cannot be measured.
    """

    def __init__(
        self,
        batch_size: int,
        dataset: Any = None,
        lengths: Any = None,
        model_input_name: str | None = None,
        generator: torch.Generator | None = None,
    ):
        if dataset is None and lengths is None:
            raise ValueError("LengthGroupedSampler needs a `dataset` to measure, or the `lengths` of its samples.")
        self.batch_size = batch_size
        self.lengths = sample_lengths(dataset, model_input_name) if lengths is None else whole_numbers(lengths)
        self.generator = generator

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        return iter(get_length_grouped_indices(self.lengths, self.batch_size, generator=self.generator))


class ComparedOrder(Sampler[int]):
    """The order that a sampler draws, with a warning where it is another one in each process.

    Parameters:
        sampler: draws from torch's global generator, which need not stand at the same place in each process: batches of
            unequal shape let dropout draw differently many numbers.

    All processes iterate it at the same time.
    """

    def __init__(self, sampler: Any):
        self.sampler = sampler
        self._is_told = False

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of a sampler that has one."""
        if callable(getattr(self.sampler, "set_epoch", None)):
            self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        order = list(self.sampler)
        if not self._is_told and len(set(from_each(hash(tuple(order))))) > 1:
            logger.warning(
                "The processes draw different orders from %s, since their random generators have parted: samples of "
                "this epoch come twice and others not at all, as under transformers. With use_seedable_sampler=False "
                "in accelerator_config the order is drawn from one generator for all.",
                type(self.sampler).__name__,
            )
            self._is_told = True
        return iter(order)


def whole_numbers(lengths: Any) -> list[int]:
    """Lengths as a list, whatever column, tensor or array they stand in: comparing them one by one has to be fast."""
    if hasattr(lengths, "source") and hasattr(lengths, "column_name"):
        # A column of a `datasets.Dataset`, which decodes each of its values for itself.
        in_table = whole_numbers_of(lengths.source, lengths.column_name)
        lengths = lengths if in_table is None else in_table
    return lengths.tolist() if hasattr(lengths, "tolist") else list(lengths)
