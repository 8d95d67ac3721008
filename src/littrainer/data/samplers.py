"""The order in which samples are drawn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import RandomSampler


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
