"""The part of an epoch that is left to be read after a resume, without reading the part before it if possible.

A loader is made to read it by replacing its parts while its iterator is made, which keeps them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, count, islice
from typing import Any, TypeGuard

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, get_worker_info

from littrainer.data.loaders import PrefetchLoader, get_full_dataset
from littrainer.data.sharding import SharedBatches, SharedStream
from littrainer.distributed.collectives import is_distributed

# Batches whose rows are remembered, for the messages that name these.
MAX_REMEMBERED_BATCHES = 4096


@contextmanager
def replace_attributes(loader: Any, parts: dict[str, Any]) -> Iterator[None]:
    """A block in which attributes of a loader are replaced; an iterator that is made in it keeps them."""
    # A DataLoader refuses another sampler or dataset once it is built.
    attributes = vars(loader) if parts else {}
    own = {name: attributes[name] for name in parts}
    attributes.update(parts)
    try:
        yield
    finally:
        attributes.update(own)


def can_skip_by_index(loader: Any) -> bool:
    """Whether the first batches of a loader can be skipped unread: the batches are those of its batch sampler."""
    return (
        _reads_as_torch(loader) and not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None
    )


def _reads_as_torch(loader: Any) -> TypeGuard[DataLoader]:
    return isinstance(loader, DataLoader) and type(loader).__iter__ in (DataLoader.__iter__, PrefetchLoader.__iter__)


class RemainingBatches(Sampler[list[int]]):
    """The batches of a batch sampler that are left of an epoch, whose rows it records.

    An iterator with persistent workers keeps it for later epochs, each of which begins with `begin`.
    """

    def __init__(self) -> None:
        # Number of a batch in the epoch -> its rows.
        self.rows: dict[int, list[int]] = {}
        self.padding = 0
        self._batch_sampler: Any = ()
        self._epoch = self._position = self._num_to_skip = 0
        self._rows_by_epoch: dict[int, dict[int, list[int]]] = {}
        self._running: Iterator[list[int]] = iter(())

    def __getstate__(self) -> dict[str, Any]:
        # A generator cannot be copied with the lightning.Trainer that leads here.
        return {**vars(self), "_running": iter(())}

    def begin(self, batch_sampler: Any, epoch: int, position: int, num_to_skip: int, num_workers: int) -> None:
        """Begin an epoch.

        Parameters:
            position: number of the first batch that is given, counted from 0.
            num_to_skip: batches of the sampler before it; where a process reads for several, those of all of them.
            num_workers: workers that take turns. Empty batches come first then, so that each batch goes to the worker
                that it would have gone to; they are neither fetched nor collated.
        """
        # Whole epochs are forgotten, the oldest first.
        while len(self._rows_by_epoch) > 1 and sum(map(len, self._rows_by_epoch.values())) > MAX_REMEMBERED_BATCHES:
            del self._rows_by_epoch[next(iter(self._rows_by_epoch))]
        self._batch_sampler, self._epoch, self._position = batch_sampler, epoch, position
        self._num_to_skip = num_to_skip
        self.padding = num_to_skip % num_workers if num_workers else 0

    def find_rows(self, epoch: int, number: int) -> list[int] | None:
        """Return the rows of a batch, by its number in the epoch; None if it was not given, or long ago."""
        return self._rows_by_epoch.get(epoch, {}).get(number)

    def __iter__(self) -> Iterator[list[int]]:
        self.rows = self._rows_by_epoch[self._epoch] = {}
        self._running = iter(self._batch_sampler)
        # Each batch is recorded without a call of a Python function.
        recorded = map(self.rows.setdefault, count(self._position), self._running)
        return chain(self._begin_after_skipped(), recorded)

    def _begin_after_skipped(self) -> Iterator[list[int]]:
        self.skip()
        padding, self.padding = self.padding, 0
        yield from ([] for _ in range(padding))

    def skip(self) -> None:
        """Skip the first batches now, since a sampler draws its order with its first batch."""
        number, self._num_to_skip = self._num_to_skip, 0
        next(islice(self._running, number, number), None)


def global_batch_size(loader: Any) -> int | None:
    """Rows that all processes together train while each takes one batch; None if unknown."""
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if isinstance(loader, PrefetchLoader):
        # Each process may have opened its own files of a stream.
        has_files = loader.sharing == "read by each" and not isinstance(loader.dataset, SharedStream)
        size = None if size is None or has_files else loader.total_batch_size
    elif is_distributed():
        # The batches of other processes are unknown with a loader of the script's own.
        return None
    return size if isinstance(size, int) else None


def count_stream_shards(loader: Any) -> int:
    """Parts of a stream that worker processes read in parallel; 1 for other data."""
    dataset = get_full_dataset(loader)
    if not isinstance(dataset, IterableDataset):
        return 1
    # Workers of a `datasets.IterableDataset` beyond its files read nothing.
    return max(1, min(loader.num_workers, getattr(dataset, "n_shards", loader.num_workers)))


def build_skipping_attributes(loader: Any, rows: list[int]) -> dict[str, Any] | None:
    """Return the parts with which a loader reads the batches that are formed of the rows after the first ones.

    Parameters:
        rows: trained rows for each of the `count_stream_shards`, also with other batches or another number of
            processes.

    Returns:
        None if the batches are not formed of rows in an order, or a stream is read in another number of parts.
    """
    if not _reads_as_torch(loader) or len(rows) != count_stream_shards(loader):
        return None
    dataset: Any = loader.dataset
    if isinstance(dataset, SharedStream):
        dataset = copy.copy(dataset)
        dataset.dataset = SkipFirstRows(dataset.dataset, rows)
        return {"dataset": dataset}
    if isinstance(dataset, IterableDataset):
        return {"dataset": SkipFirstRows(dataset, rows)}
    batch_sampler: Any = copy.copy(loader.batch_sampler)
    innermost = batch_sampler
    if isinstance(batch_sampler, SharedBatches):
        batch_sampler.batch_sampler = innermost = copy.copy(batch_sampler.batch_sampler)
    if type(innermost) is not BatchSampler:
        return None
    innermost.sampler = SkipFirstRows(innermost.sampler, rows)
    return {"batch_sampler": batch_sampler}


def copy_with_attributes(loader: DataLoader, parts: dict[str, Any]) -> DataLoader:
    """Return a copy of a loader with other parts, whose length is to be known."""
    copied = copy.copy(loader)
    vars(copied).update(parts)
    return copied


class SkipFirstRows(IterableDataset[Any]):
    """A stream, or the order of a sampler, from a row on in the next iteration; in later ones all.

    Parameters:
        dataset: the stream, or the sampler.
        rows: rows to skip, for each worker that reads a stream.
    """

    def __init__(self, dataset: Any, rows: list[int]):
        self.dataset = dataset
        self.rows = rows
        # A stream with `set_epoch` has the order of the epoch.
        self.generator = None if hasattr(dataset, "set_epoch") else getattr(dataset, "generator", None)

    def __iter__(self) -> Iterator[Any]:
        worker = getattr(get_worker_info(), "id", 0)
        skipped = sum(self.rows[worker : worker + 1])
        self.rows = []
        return islice(iter(self.dataset), skipped, None)

    def __len__(self) -> int:
        return max(len(self.dataset) - sum(self.rows), 0)
