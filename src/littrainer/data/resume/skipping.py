"""Skipping of trained data in a resumed epoch, without reading the data if possible.

A loader's attributes are replaced only while its iterator is created, since the iterator keeps the replacements.
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

# Batches whose rows are kept for error messages.
MAX_REMEMBERED_BATCHES = 4096


@contextmanager
def replace_attributes(loader: Any, replacements: dict[str, Any]) -> Iterator[None]:
    """Replace attributes of a loader within the block."""
    # `setattr` would fail: a DataLoader rejects another sampler or dataset after construction.
    attributes = vars(loader) if replacements else {}
    originals = {name: attributes[name] for name in replacements}
    attributes.update(replacements)
    try:
        yield
    finally:
        attributes.update(originals)


def can_skip_by_index(loader: Any) -> bool:
    return (
        _has_torch_iterator(loader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


def _has_torch_iterator(loader: Any) -> TypeGuard[DataLoader]:
    return isinstance(loader, DataLoader) and type(loader).__iter__ in (DataLoader.__iter__, PrefetchLoader.__iter__)


class RemainingBatches(Sampler[list[int]]):
    """Batch sampler over the remaining batches of an epoch, which records their rows.

    Persistent workers keep it for later epochs; `begin` starts each epoch.
    """

    def __init__(self) -> None:
        # Batch number in the epoch -> rows.
        self.rows: dict[int, list[int]] = {}
        self.padding = 0
        self._batch_sampler: Any = ()
        self._epoch = self._position = self._num_to_skip = 0
        self._rows_by_epoch: dict[int, dict[int, list[int]]] = {}
        self._running: Iterator[list[int]] = iter(())

    def __getstate__(self) -> dict[str, Any]:
        # Generators cannot be copied, and copies of a lightning.Trainer include this object.
        return {**vars(self), "_running": iter(())}

    def begin(self, batch_sampler: Any, epoch: int, position: int, num_to_skip: int, num_workers: int) -> None:
        """Begin an epoch.

        Parameters:
            position: index of the first remaining batch.
            num_to_skip: batches of the sampler to skip, including other processes' batches if rank 0 reads for all.
            num_workers: workers that take turns; empty batches are prepended, so that each batch goes to the same
                worker as before.
        """
        while len(self._rows_by_epoch) > 1 and sum(map(len, self._rows_by_epoch.values())) > MAX_REMEMBERED_BATCHES:
            del self._rows_by_epoch[next(iter(self._rows_by_epoch))]
        self._batch_sampler, self._epoch, self._position = batch_sampler, epoch, position
        self._num_to_skip = num_to_skip
        self.padding = num_to_skip % num_workers if num_workers else 0

    def find_rows(self, epoch: int, number: int) -> list[int] | None:
        return self._rows_by_epoch.get(epoch, {}).get(number)

    def __iter__(self) -> Iterator[list[int]]:
        self.rows = self._rows_by_epoch[self._epoch] = {}
        self._running = iter(self._batch_sampler)
        # Recording by `map` costs no Python call for each batch.
        recorded = map(self.rows.setdefault, count(self._position), self._running)
        return chain(self._skip_and_pad(), recorded)

    def _skip_and_pad(self) -> Iterator[list[int]]:
        self.skip()
        padding, self.padding = self.padding, 0
        yield from ([] for _ in range(padding))

    def skip(self) -> None:
        """Skip the first batches now, which makes the sampler draw its order."""
        number, self._num_to_skip = self._num_to_skip, 0
        next(islice(self._running, number, number), None)


def global_batch_size(loader: Any) -> int | None:
    """Return the number of rows in a batch of all processes together; None if unknown."""
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if isinstance(loader, PrefetchLoader):
        reads_separate_files = loader.sharing == "read by each" and not isinstance(loader.dataset, SharedStream)
        size = None if size is None or reads_separate_files else loader.total_batch_size
    elif is_distributed():
        # The script's own loader may give other processes batches of another size.
        return None
    return size if isinstance(size, int) else None


def count_stream_shards(loader: Any) -> int:
    """Return the number of stream shards that workers read in parallel; 1 for other data."""
    dataset = get_full_dataset(loader)
    if not isinstance(dataset, IterableDataset):
        return 1
    # Workers of a `datasets.IterableDataset` beyond the number of its shards get no data.
    return max(1, min(loader.num_workers, getattr(dataset, "n_shards", loader.num_workers)))


def build_skipping_attributes(loader: Any, rows: list[int]) -> dict[str, Any] | None:
    """Return the attributes to replace in a loader, so that its batches begin after the first rows.

    Parameters:
        rows: trained rows by stream shard.

    Returns:
        None if batches are not formed from successive rows, or the number of stream shards has changed.
    """
    if not _has_torch_iterator(loader) or len(rows) != count_stream_shards(loader):
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


def copy_with_attributes(loader: DataLoader, replacements: dict[str, Any]) -> DataLoader:
    copied = copy.copy(loader)
    vars(copied).update(replacements)
    return copied


class SkipFirstRows(IterableDataset[Any]):
    """Stream or sampler that skips the first rows, in its next iteration only; `rows` has their number by worker."""

    def __init__(self, dataset: Any, rows: list[int]):
        self.dataset = dataset
        self.rows = rows
        # `SharedStream` seeds this generator by epoch, unless the stream has `set_epoch`.
        self.generator = None if hasattr(dataset, "set_epoch") else getattr(dataset, "generator", None)

    def __iter__(self) -> Iterator[Any]:
        worker = getattr(get_worker_info(), "id", 0)
        skipped = sum(self.rows[worker : worker + 1])
        self.rows = []
        return islice(iter(self.dataset), skipped, None)

    def __len__(self) -> int:
        return max(len(self.dataset) - sum(self.rows), 0)
