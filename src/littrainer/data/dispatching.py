"""Batches that the first process reads for all: each of the others is sent its part.

Streams are read so unless the arguments say otherwise, as under accelerate: a stream need not give the same samples in
each process, and is opened once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice, repeat
from typing import Any, NamedTuple

import numpy as np
import torch

from littrainer.data.sharding import Share, in_rounds
from littrainer.distributed.agreement import FailedElsewhere, from_each, from_first_to_each
from littrainer.errors.nested_values import map_nested


def first_dimension(batch: Any) -> int | None:
    """Length of the first dimension of the first tensor found in a nested batch: the samples in it."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() > 0 else None
    if hasattr(batch, "shape"):
        return batch.shape[0] if len(batch.shape) > 0 else None
    values = batch.values() if hasattr(batch, "values") else batch if isinstance(batch, (list, tuple)) else ()
    return next((size for size in map(first_dimension, values) if size is not None), None)


def cut_rows(batch: Any, rows: slice) -> Any:
    """The rows of a batch's tensors and arrays, copied; anything else is left as it is."""

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            # A view would carry the whole batch with it to another process.
            return leaf[rows].clone()
        return leaf[rows].copy() if isinstance(leaf, np.ndarray) and leaf.ndim else leaf

    return map_nested(cut, batch)


def joined_rows(batches: list[Any]) -> Any:
    """One batch with the rows of all, built as the first one is.

    Raises:
        TypeError, ValueError, RuntimeError: the batches are not built alike, or their rows are not equally long.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Mapping):
        return type(first)({name: joined_rows([batch[name] for batch in batches]) for name in first})  # type: ignore[call-arg]
    if isinstance(first, (list, tuple)):
        columns = [joined_rows(list(column)) for column in zip(*batches, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    if isinstance(first, torch.Tensor):
        return torch.cat(batches)
    if isinstance(first, np.ndarray):
        return np.concatenate(batches)
    raise TypeError(f"values of type {type(first).__name__}, which have no rows")


def in_plain_containers(batch: Any) -> Any:
    """A batch whose mappings are dicts and whose sequences are lists, as any checkpoint can hold them."""
    if isinstance(batch, Mapping):
        return {name: in_plain_containers(value) for name, value in batch.items()}
    return [in_plain_containers(value) for value in batch] if isinstance(batch, (list, tuple)) else batch


# What stands for a round in a process that reads nothing, and for what comes after the last one.
UNREAD_ROUND = object()
NO_BATCH = object()


class _Part(NamedTuple):
    """What a process is sent.

    Parameters:
        batch: its part of a round.
        rows: samples in the round, before it was filled up.
        is_last: no round comes after it.
        error: why there is no batch; None if there is one.
    """

    batch: Any
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

    def __init__(self, share: Share, reads: bool, drop_last: bool, cut: Callable[..., Any] | None = None):
        self.share = share
        self.reads = reads
        self.drop_last = drop_last
        self._cut = cut
        self._part_of_each: list[int] = []
        # The beginnings of the batches of the first round, which together hold a sample for each process.
        self._first_rows: list[Any] | None = None
        self._is_resumed = False
        # What reading failed with, where it is done.
        self._error: Exception | None = None
        self.rows_in_last_round = -1

    @property
    def batches_of_round(self) -> int:
        """Batches that are read for one that each process gets."""
        return 1 if self.share.split_batches else self.share.of

    def length(self, batches: int) -> int:
        """Batches that each process gets.

        Parameters:
            batches: those that are read.
        """
        rounds, left_over = divmod(batches, self.batches_of_round)
        return rounds + (left_over > 0 and not self.drop_last)

    def state(self) -> list[Any] | None:
        """What handing out the rest of the epoch needs from its beginning."""
        return self._first_rows

    def resume(self, state: list[Any] | None) -> None:
        """Let the next epoch go on from a state."""
        self._first_rows, self._is_resumed = state, True

    def skip(self, batches: Iterator[Any], number: int) -> None:
        """Read the first batches of an epoch, which have been handed out before.

        Parameters:
            number: batches that each process has had.
        """
        if self.reads and number:
            skipped = islice(in_rounds(batches, self.batches_of_round), number)
            first = next(skipped, [])
            if self._first_rows is None:
                self._note_first_rows(first)
                self._is_resumed = True
            next(islice(skipped, number, number), None)

    def rounds(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The rounds of an epoch: lists of batches where they are read, a sign for each of them elsewhere."""
        self._error = None
        return self._read(batches) if self.reads else repeat(UNREAD_ROUND)

    def _read(self, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            for batches_of_round in in_rounds(batches, self.batches_of_round):
                if len(batches_of_round) == self.batches_of_round or not self.drop_last:
                    yield batches_of_round
        except Exception as error:
            # The other processes hear of it before this one ends.
            self._error = error

    def begin(self, first: Any) -> Any:
        """The first round, or `NO_BATCH` in all processes where the one that reads has none.

        Parameters:
            first: what `rounds` gave first.

        Raises:
            FailedElsewhere: reading failed in the first process.
        """
        self.rows_in_last_round = -1
        if not self._is_resumed:
            self._first_rows = None
        self._is_resumed = False
        if not self._part_of_each:
            self._part_of_each = from_each(self.share.number)
        parts = [_Part(None, None, first is NO_BATCH)] * len(self._part_of_each) if self.reads else None
        return NO_BATCH if self._exchange(parts).is_last else first

    def hand_out(self, current: Any, following: Any) -> tuple[Any, Any]:
        """This process's part of a round, and the round after it.

        Parameters:
            current: the round.
            following: the one after it, as far as this process knows; `NO_BATCH` after the last one.

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
            self.rows_in_last_round = -1 if own.rows is None else own.rows
        return own.batch, NO_BATCH if own.is_last else following

    def _exchange(self, parts: list[_Part] | None) -> _Part:
        error = self._error
        if error is not None:
            parts = [_Part(None, None, True, f"{type(error).__name__}: {error}")] * len(self._part_of_each)
        own = from_first_to_each(parts)
        if error is not None:
            raise error
        if own.error is not None:
            raise FailedElsewhere(f"Process 0, which reads the data for all, failed with {own.error}")
        return own

    def _parts(self, batches: list[Any], is_last: bool) -> list[_Part]:
        of = self.share.of
        if self._first_rows is None:
            self._note_first_rows(batches)
        sizes = [first_dimension(batch) for batch in batches]
        if len(batches) == of and not self.share.split_batches and len(set(sizes)) == 1 and self._cut is None:
            rows = None if sizes[0] is None else sizes[0] * of
            own = batches
        else:
            whole = _joined(batches)
            rows = first_dimension(whole) or 0
            size, left_over = divmod(rows, of)
            if left_over and is_last and not self.drop_last:
                whole = _joined([whole, *(self._first_rows or [])])
                size += 1
            own = [self._part(whole, number, size) for number in range(of)]
        return [_Part(own[number], rows, is_last) for number in self._part_of_each]

    def _note_first_rows(self, batches: list[Any]) -> None:
        if not self.drop_last:
            beginning = slice(0, self.share.of)
            self._first_rows = [in_plain_containers(cut_rows(batch, beginning)) for batch in batches]

    def _part(self, whole: Any, number: int, size: int) -> Any:
        rows = slice(number * size, (number + 1) * size)
        if self._cut is None:
            return cut_rows(whole, rows)
        return self._cut(whole, rows, process_index=number, num_processes=self.share.of)


def _joined(batches: list[Any]) -> Any:
    try:
        return joined_rows(batches)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(
            f"The first process reads the data for all, and its batches cannot be divided between them: {error}. Let "
            "the collator pad to one length (pad_to_multiple_of, padding='max_length'), or set dispatch_batches=False "
            "in accelerator_config, so that each process reads its own part."
        ) from error
