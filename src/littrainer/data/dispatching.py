"""Batches that the first process reads for all, and of which it sends each of the others a part.

By default streams are read in this manner, as under accelerate: a stream need not give the same samples in each
process, and is opened once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice, repeat
from typing import Any, NamedTuple

import numpy as np
import torch

from littrainer.data.sharding import ShardSpec, iterate_chunks
from littrainer.distributed.collectives import FailedElsewhere, all_gather_object, scatter_object
from littrainer.runtime.nested_values import map_nested


def find_batch_size(batch: Any) -> int | None:
    """Return the length of the first dimension of the first tensor in a nested batch, which is its samples."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() > 0 else None
    if hasattr(batch, "shape"):
        return batch.shape[0] if len(batch.shape) > 0 else None
    values = batch.values() if hasattr(batch, "values") else batch if isinstance(batch, (list, tuple)) else ()
    return next((size for size in map(find_batch_size, values) if size is not None), None)


def cut_rows(batch: Any, rows: slice) -> Any:
    """Return a batch with copies of some rows of its tensors and arrays, and with all else as it is."""

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            # A view would carry the whole batch with it to another process.
            return leaf[rows].clone()
        return leaf[rows].copy() if isinstance(leaf, np.ndarray) and leaf.ndim else leaf

    return map_nested(cut, batch)


def join_rows(batches: list[Any]) -> Any:
    """Return one batch with the rows of all, built as the first one is.

    Raises:
        TypeError, ValueError, RuntimeError: the batches are not built alike, or their rows are not equally long.
    """
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
    """Return a batch whose mappings are dicts and whose sequences are lists, which any checkpoint can store."""
    if isinstance(batch, Mapping):
        return {name: convert_to_plain_containers(value) for name, value in batch.items()}
    return [convert_to_plain_containers(value) for value in batch] if isinstance(batch, (list, tuple)) else batch


# Placeholders for a round in a process that reads nothing, and for the batch after the last one.
UNREAD_ROUND = object()
NO_BATCH = object()


class _Part(NamedTuple):
    """The message to a process: its part of a round, or the error because of which there is none."""

    batch: Any
    # Samples in the round, before it was filled up.
    rows: int | None
    is_last: bool
    error: str | None = None


class Dispatch:
    """Hands out the batches that the first process reads.

    Parameters:
        share: this process's part.
        reads: whether this process is the one that reads.
        drop_last: an incomplete last round is left out; else it is filled up with the first samples.
        cut: takes a batch, a slice of rows, the number of a part and how many there are; cuts the part out.
    """

    def __init__(self, share: ShardSpec, reads: bool, drop_last: bool, cut: Callable[..., Any] | None = None):
        self.share = share
        self.reads = reads
        self.drop_last = drop_last
        self._cut = cut
        self._part_of_each: list[int] = []
        # The beginnings of the batches of the first round, which together hold a sample for each process; a resumed
        # epoch needs them to fill up its last round.
        self.first_rows: list[Any] | None = None
        self._is_resumed = False
        # The error of reading, in the process that reads.
        self._error: Exception | None = None
        self.last_global_batch_size = -1

    @property
    def batches_per_global_batch(self) -> int:
        """Batches that are read for one that each process gets."""
        return 1 if self.share.split_batches else self.share.count

    def length(self, batches: int) -> int:
        """Return the batches that each process gets, of the number of batches that are read."""
        rounds, left_over = divmod(batches, self.batches_per_global_batch)
        return rounds + (left_over > 0 and not self.drop_last)

    def resume(self, first_rows: list[Any] | None) -> None:
        """Let the next epoch continue with the `first_rows` of its beginning."""
        self.first_rows, self._is_resumed = first_rows, True

    def skip(self, batches: Iterator[Any], number: int) -> None:
        """Read the first batches of an epoch, of which each process has had a number before."""
        if self.reads and number:
            skipped = islice(iterate_chunks(batches, self.batches_per_global_batch), number)
            first = next(skipped, [])
            if self.first_rows is None:
                self._note_first_rows(first)
                self._is_resumed = True
            next(islice(skipped, number, number), None)

    def rounds(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the rounds of an epoch: lists of batches if they are read here, else a placeholder for each."""
        self._error = None
        return self._read_rounds(batches) if self.reads else repeat(UNREAD_ROUND)

    def _read_rounds(self, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            for batches_per_global_batch in iterate_chunks(batches, self.batches_per_global_batch):
                if len(batches_per_global_batch) == self.batches_per_global_batch or not self.drop_last:
                    yield batches_per_global_batch
        except Exception as error:
            # Raised when the other processes have been sent it.
            self._error = error

    def begin(self, first: Any) -> Any:
        """Return the first round of `rounds`, or `NO_BATCH` in all processes if the one that reads has none.

        Raises:
            FailedElsewhere: reading failed in the first process.
        """
        self.last_global_batch_size = -1
        if not self._is_resumed:
            self.first_rows = None
        self._is_resumed = False
        if not self._part_of_each:
            self._part_of_each = all_gather_object(self.share.index)
        parts = [_Part(None, None, first is NO_BATCH)] * len(self._part_of_each) if self.reads else None
        return NO_BATCH if self._exchange(parts).is_last else first

    def hand_out(self, current: Any, following: Any) -> tuple[Any, Any]:
        """Return this process's part of a round, and the round after it.

        Parameters:
            following: the round after the current one; `NO_BATCH` after the last one, if this process reads.

        Raises:
            FailedElsewhere: reading failed in the first process.
            ValueError: the batches of a round cannot be put together.
        """
        parts = None
        if self.reads and self._error is None:
            try:
                parts = self._parts(current, is_last=following is NO_BATCH)
            except Exception as error:
                self._error = error
        own = self._exchange(parts)
        if own.is_last:
            self.last_global_batch_size = -1 if own.rows is None else own.rows
        return own.batch, NO_BATCH if own.is_last else following

    def _exchange(self, parts: list[_Part] | None) -> _Part:
        error = self._error
        if error is not None:
            parts = [_Part(None, None, True, f"{type(error).__name__}: {error}")] * len(self._part_of_each)
        own = scatter_object(parts)
        if error is not None:
            raise error
        if own.error is not None:
            raise FailedElsewhere(f"Process 0, which reads the data for all, failed with {own.error}")
        return own

    def _parts(self, batches: list[Any], is_last: bool) -> list[_Part]:
        of = self.share.count
        if self.first_rows is None:
            self._note_first_rows(batches)
        sizes = [find_batch_size(batch) for batch in batches]
        if len(batches) == of and not self.share.split_batches and len(set(sizes)) == 1 and self._cut is None:
            rows = None if sizes[0] is None else sizes[0] * of
            own = batches
        else:
            whole = _join(batches)
            rows = find_batch_size(whole) or 0
            size, left_over = divmod(rows, of)
            if left_over and is_last and not self.drop_last:
                whole = _join([whole, *(self.first_rows or [])])
                size += 1
            own = [self._part(whole, number, size) for number in range(of)]
        return [_Part(own[number], rows, is_last) for number in self._part_of_each]

    def _note_first_rows(self, batches: list[Any]) -> None:
        if not self.drop_last:
            beginning = slice(0, self.share.count)
            self.first_rows = [convert_to_plain_containers(cut_rows(batch, beginning)) for batch in batches]

    def _part(self, whole: Any, number: int, size: int) -> Any:
        rows = slice(number * size, (number + 1) * size)
        if self._cut is None:
            return cut_rows(whole, rows)
        return self._cut(whole, rows, process_index=number, num_processes=self.share.count)


def _join(batches: list[Any]) -> Any:
    try:
        return join_rows(batches)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(
            f"The first process reads the data for all, and its batches cannot be divided between them: {error}. Let "
            "the collator pad to one length (pad_to_multiple_of, padding='max_length'), or set dispatch_batches=False "
            "in accelerator_config, so that each process reads its own part."
        ) from error
