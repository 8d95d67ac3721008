"""The batches of a loader from a number on: what resuming in the middle of an epoch reads."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Sampler

from littrainer.data.loaders import LookaheadLoader, tell_epoch


def skips_by_index(loader: Any) -> bool:
    """Whether the first batches of a loader can be left out without being read.

    True for DataLoaders over map-style data, also of a class of the script's own, as long as their batches are those of
    their batch sampler.
    """
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ in (DataLoader.__iter__, LookaheadLoader.__iter__)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


def without_first_batches(loader: DataLoader, number: int, keeps_turns: bool = False) -> DataLoader:
    """The same loader without the first batches of its next iteration, which are not read; later ones are complete.

    Parameters:
        loader: one that `skips_by_index`.
        number: batches to leave out; where one process reads for several, as many for each of them.
        keeps_turns: each worker gets the batches that it would have got. Empty ones may come first then, which are
            neither fetched nor collated while `reporting_workers` starts the workers.
    """
    later = copied_loader(loader)
    dispatch = getattr(loader, "dispatch", None)
    if dispatch is not None:
        number *= dispatch.batches_of_round
    # A DataLoader refuses another sampler once it stands, and a subclass may not be constructed as its parent is.
    turns = loader.num_workers if keeps_turns else 0
    vars(later)["batch_sampler"] = LaterBatches(loader.batch_sampler, number, turns)
    return later


def copied_loader(loader: DataLoader) -> DataLoader:
    """A loader over the same dataset with the same settings, and with workers of its own."""
    copied = copy.copy(loader)
    vars(copied)["_iterator"] = None
    return copied


class LaterBatches(Sampler[list[int]]):
    """The batches of another batch sampler from a number on, in the next iteration; in later ones all.

    Parameters:
        number: batches to leave out.
        turns: workers that take turns. Each of the batches left has to go to the worker that it would have gone to, so
            some empty ones go before them.
    """

    def __init__(self, batch_sampler: Any, number: int, turns: int = 0):
        self.batch_sampler = batch_sampler
        self.number = number
        self.padding = number % turns if turns else 0
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.sampler = getattr(batch_sampler, "sampler", None)
        self._running: Iterator[list[int]] | None = None

    def set_epoch(self, epoch: int) -> None:
        tell_epoch(epoch, self.batch_sampler, self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        self._running = iter(self.batch_sampler)
        return self._rest(self._running)

    def skip(self) -> None:
        """Leave the first batches out now, and not when the next one is asked for: a sampler draws its order then."""
        number, self.number = self.number, 0
        if self._running is None or not number:
            return
        jump = getattr(self.batch_sampler, "batches_from", None)
        if callable(jump):
            self._running = jump(number)
        else:
            next(islice(self._running, number, number), None)

    def _rest(self, running: Iterator[list[int]]) -> Iterator[list[int]]:
        self.skip()
        padding, self.padding = self.padding, 0
        yield from ([] for _ in range(padding))
        yield from self._running if self._running is not None else running

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.number, 0)
