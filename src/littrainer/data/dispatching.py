"""Dispatch of batches: the first process reads for all processes and scatters the parts.

Streams are dispatched by default, as under accelerate, since a stream may give other samples in each process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice, repeat
from typing import Any, NamedTuple

import numpy as np
import torch

from littrainer.data.sharding import ShardSpec, iterate_chunks
from littrainer.distributed.collectives import PeerFailedError, all_gather_object, scatter_object
from littrainer.runtime.nested_values import is_sample_list, map_nested


def find_batch_size(batch: Any) -> int | None:
    """Return the number of rows of the first tensor in a nested batch, or the length of a list of samples.

    In a list, mappings of unequal sizes are samples, and of equal sizes parts of one batch. In a mapping, lists are
    read last, since their first tensor may belong to a single sample.
    """
    if is_sample_list(batch):
        return len(batch)
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() > 0 else None
    if hasattr(batch, "shape"):
        return batch.shape[0] if len(batch.shape) > 0 else None
    values: Any = batch if isinstance(batch, (list, tuple)) else ()
    if values and all(isinstance(sample, Mapping) for sample in values):
        sizes = {find_batch_size(sample) for sample in values}
        return len(values) if len(sizes) > 1 or None in sizes else sizes.pop()
    if hasattr(batch, "values"):
        values = sorted(batch.values(), key=lambda value: isinstance(value, (list, tuple)))
    return next((size for size in map(find_batch_size, values) if size is not None), None)


def cut_rows(batch: Any, rows: slice) -> Any:
    def cut(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            # Pickling a view would send the storage of the whole batch.
            return leaf[rows].clone()
        return leaf[rows].copy() if isinstance(leaf, np.ndarray) and leaf.ndim else leaf

    return map_nested(cut, batch)


def join_rows(batches: list[Any]) -> Any:
    """Return a batch with the rows of all batches, in the structure of the first."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Mapping):
        return type(first)({name: join_rows([batch[name] for batch in batches]) for name in first})  # type: ignore[call-arg]
    if isinstance(first, (list, tuple)):
        columns = [join_rows(list(column)) for column in zip(*batches, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    if isinstance(first, torch.Tensor):
        return torch.cat(batches)
    if isinstance(first, np.ndarray):
        return np.concatenate(batches)
    raise TypeError(f"values of type {type(first).__name__}, which have no rows")


def convert_to_plain_containers(batch: Any) -> Any:
    """Return dicts and lists, which any checkpoint can store."""
    if isinstance(batch, Mapping):
        return {name: convert_to_plain_containers(value) for name, value in batch.items()}
    return [convert_to_plain_containers(value) for value in batch] if isinstance(batch, (list, tuple)) else batch


# Global batch in processes that do not read, and end of the data.
UNREAD_BATCH = object()
NO_BATCH = object()


class _ScatteredPart(NamedTuple):
    """Part of a global batch for a process, or the reader's error."""

    batch: Any
    # Samples in the global batch, without padding.
    rows: int | None
    is_last: bool
    error: str | None = None


class Dispatch:
    """Scattering of the batches that the first process reads.

    Parameters:
        drop_last: drop an incomplete last global batch; else pad it.
    """

    def __init__(self, shard: ShardSpec, reads: bool, drop_last: bool):
        self.shard = shard
        self.reads = reads
        self.drop_last = drop_last
        self._shard_by_rank: list[int] = []
        # First rows of the first global batch, which pad the last global batch of a resumed epoch.
        self.first_rows: list[Any] | None = None
        self._is_resumed = False
        self._error: Exception | None = None
        self.last_global_batch_size = -1

    @property
    def batches_per_global_batch(self) -> int:
        return 1 if self.shard.split_batches else self.shard.count

    def count_global_batches(self, batches: int) -> int:
        complete, remainder = divmod(batches, self.batches_per_global_batch)
        return complete + (remainder > 0 and not self.drop_last)

    def resume(self, first_rows: list[Any] | None) -> None:
        self.first_rows = first_rows
        self._is_resumed = True

    def skip(self, batches: Iterator[Any], number: int) -> None:
        if self.reads and number:
            skipped = islice(iterate_chunks(batches, self.batches_per_global_batch), number)
            first = next(skipped, [])
            if self.first_rows is None:
                self._record_first_rows(first)
                self._is_resumed = True
            next(islice(skipped, number, number), None)

    def global_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        self._error = None
        return self._form_global_batches(batches) if self.reads else repeat(UNREAD_BATCH)

    def _form_global_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            for chunk in iterate_chunks(batches, self.batches_per_global_batch):
                if len(chunk) == self.batches_per_global_batch or not self.drop_last:
                    yield chunk
        except Exception as error:
            # Raised after the next scatter, so that all processes fail.
            self._error = error

    def begin(self, first: Any) -> Any:
        """Return the first global batch, or `NO_BATCH` in all processes if there is none."""
        self.last_global_batch_size = -1
        if not self._is_resumed:
            self.first_rows = None
        self._is_resumed = False
        if not self._shard_by_rank:
            self._shard_by_rank = all_gather_object(self.shard.index)
        parts = [_ScatteredPart(None, None, first is NO_BATCH)] * len(self._shard_by_rank) if self.reads else None
        return NO_BATCH if self._scatter_parts(parts).is_last else first

    def scatter(self, current: Any, following: Any) -> tuple[Any, Any]:
        """Return this process's part of a global batch, and the next global batch.

        Raises:
            PeerFailedError: reading failed in the first process.
        """
        parts = None
        if self.reads and self._error is None:
            try:
                parts = self._split(current, is_last=following is NO_BATCH)
            except Exception as error:
                self._error = error
        part = self._scatter_parts(parts)
        if part.is_last:
            self.last_global_batch_size = -1 if part.rows is None else part.rows
        return part.batch, NO_BATCH if part.is_last else following

    def _scatter_parts(self, parts: list[_ScatteredPart] | None) -> _ScatteredPart:
        error = self._error
        if error is not None:
            failure = _ScatteredPart(None, None, True, f"{type(error).__name__}: {error}")
            parts = [failure] * len(self._shard_by_rank)
        part = scatter_object(parts)
        if error is not None:
            raise error
        if part.error is not None:
            raise PeerFailedError(f"Process 0, which reads the data for all, failed with {part.error}")
        return part

    def _split(self, batches: list[Any], is_last: bool) -> list[_ScatteredPart]:
        count = self.shard.count
        if self.first_rows is None:
            self._record_first_rows(batches)
        sizes = [find_batch_size(batch) for batch in batches]
        if len(batches) == count and not self.shard.split_batches and len(set(sizes)) == 1:
            rows = None if sizes[0] is None else sizes[0] * count
            shards = batches
        else:
            global_batch = _join_or_explain(batches)
            rows = find_batch_size(global_batch) or 0
            size, remainder = divmod(rows, count)
            if remainder and is_last and not self.drop_last:
                global_batch = _join_or_explain([global_batch, *(self.first_rows or [])])
                size += 1
            shards = [cut_rows(global_batch, slice(index * size, (index + 1) * size)) for index in range(count)]
        return [_ScatteredPart(shards[index], rows, is_last) for index in self._shard_by_rank]

    def _record_first_rows(self, batches: list[Any]) -> None:
        if not self.drop_last:
            first = slice(0, self.shard.count)
            self.first_rows = [convert_to_plain_containers(cut_rows(batch, first)) for batch in batches]


def _join_or_explain(batches: list[Any]) -> Any:
    try:
        return join_rows(batches)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(
            f"The first process reads the data for all, and its batches cannot be divided between them: {error}. Let "
            "the collator pad to one length (pad_to_multiple_of, padding='max_length'), or set dispatch_batches=False "
            "in accelerator_config, so that each process reads its own part."
        ) from error
