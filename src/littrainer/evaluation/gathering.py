"""Nested outputs of the batches of an evaluation, put together into arrays that exist once.

An evaluation's arrays can be as large as the machine allows. If the number of rows is known, each batch is written to
its place in the final array when it comes, and nothing is joined by making a second copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from littrainer.runtime.nested_values import (
    PADDING,
    SampleList,
    concat_nested,
    convert_to_numpy,
    is_sample_list,
    map_nested,
    mixed_shapes_message,
    mixed_types_error,
)

# Batches wait to be written in one piece until they are as large.
WAITING_BYTES = 1 << 20


class SampleLists:
    """Marks, in nested outputs of the batches, lists that have an entry for each sample.

    Parameters:
        is_certain: a list with as many entries has them. Otherwise the first batch of several samples, or with such a
            list, decides: a list whose tensors all have a row for each sample has an entry for each layer.
    """

    def __init__(self, is_certain: bool):
        self.is_certain: bool | None = is_certain or None

    def marked(self, value: Any, rows: int | None) -> Any:
        """Return the outputs of a batch with so many samples."""
        found = False

        def has_samples(part: Any) -> bool:
            nonlocal found
            is_row = isinstance(part, tuple) and all(isinstance(entry, Mapping) for entry in part)
            if not (is_row or isinstance(part, list)) or len(part) != rows:
                return False
            have_rows: list[bool] = []
            map_nested(lambda leaf: have_rows.append(np.shape(leaf)[:1] in ((), (rows,))), part)
            are_samples = self.is_certain or not all(have_rows)
            found |= are_samples
            return are_samples

        if self.is_certain is not False:
            value = map_nested(
                lambda leaf: SampleList(leaf) if isinstance(leaf, (list, tuple)) else leaf, value, has_samples
            )
            self.is_certain = self.is_certain or found or (None if rows == 1 else False)
        return value


class BatchCollection:
    """Outputs collected over the batches of an evaluation.

    Parameters:
        join: put the batches together; else they stay a list with one entry for each.
        expected_rows: rows of all batches together, if that is known.

    Batches stay on an accelerator until `move_to_host()`.
    """

    def __init__(self, join: bool = True, expected_rows: int | None = None):
        self.join = join
        self.expected_rows = expected_rows
        self._waiting: deque[Any] = deque()
        self._waiting_bytes = 0
        self._joined: Any = None
        self._separate: list[Any] = []
        # As the batches are built, without rows.
        self._structure: Any = None

    def add(self, batch: Any) -> None:
        """Take in one batch's nested tensors, which have to fit those before where they are joined."""
        if self.join and not isinstance(batch, torch.Tensor):
            structures = [map_nested(_without_rows, batch, is_sample_list)]
            self._structure = concat_nested(structures if self._structure is None else [self._structure, *structures])
        self._waiting.append(map_nested(_without_unused_storage, batch))
        size, is_on_host = _bytes_and_place(batch)
        self._waiting_bytes += size
        # Large tensors of the host would be held twice while they wait.
        if self.join and is_on_host and self._waiting_bytes >= WAITING_BYTES:
            self.move_to_host()

    def move_to_host(self) -> None:
        """Convert what has been collected to NumPy, which frees the device's memory."""
        if self.join and len(self._waiting) > 1 and self._waiting_bytes < 2 * WAITING_BYTES:
            # Many small batches are written faster in one piece.
            self._waiting = deque([concat_nested(list(self._waiting))])
        self._waiting_bytes = 0
        while self._waiting:
            batch = self._waiting.popleft()
            if not self.join:
                self._separate.append(convert_to_numpy(batch))
                continue
            if self._joined is None:
                self._joined = map_nested(
                    lambda leaf: HostRows(self.expected_rows) if isinstance(leaf, torch.Tensor) else _Pieces(),
                    batch,
                    is_sample_list,
                )
            _write(self._joined, batch)

    def arrays(self) -> Any:
        """Return all that was collected as NumPy arrays; None if there was nothing."""
        self.move_to_host()
        if not self.join:
            return self._separate or None
        return None if self._joined is None else map_nested(lambda leaf: leaf.joined(), self._joined)


class HostRows:
    """Tensors collected row by row; second dimensions of unequal length are padded with -100.

    Parameters:
        expected_rows: how many there will be, if that is known. More or fewer may come; memory that is never
            written to costs nothing.
    """

    def __init__(self, expected_rows: int | None = None):
        self.expected_rows = expected_rows
        self.rows = 0
        self._memory: torch.Tensor | None = None
        self._is_one_number = False

    def write(self, piece: torch.Tensor) -> None:
        """Take in the rows of one batch, from any device; a single number counts as one row.

        Raises:
            ValueError: the rows differ from those before in more than their second dimension.
            MemoryError: the host has no memory for them.
        """
        self._is_one_number = self.rows == 0 and piece.dim() == 0
        piece = torch.atleast_1d(piece.detach())
        place = self._memory_with(piece)[self.rows : self.rows + len(piece)]
        _copy_padded(place, piece)
        self.rows += len(piece)

    def joined(self) -> np.ndarray:
        """Return all rows as one array, which shares its memory with this collection."""
        assert self._memory is not None
        rows = self._memory[: self.rows].numpy()
        return rows.reshape(()) if self._is_one_number else rows

    def _memory_with(self, piece: torch.Tensor) -> torch.Tensor:
        """Return the memory, made larger if the piece does not fit in below the rows that are there."""
        # NumPy has no bfloat16.
        dtype = torch.float32 if piece.dtype == torch.bfloat16 else piece.dtype
        before, needed, shape = self._memory, self.rows + len(piece), list(piece.shape)
        if before is None:
            shape[0] = max(needed, self.expected_rows or 0)
            self._memory = _memory(shape, dtype)
            return self._memory
        if piece.dim() != before.dim() or shape[2:] != list(before.shape[2:]):
            raise ValueError(mixed_shapes_message((self.rows, *before.shape[1:]), tuple(piece.shape)))
        shape[0] = len(before) if needed <= len(before) else max(needed, 2 * len(before))
        shape[1:2] = [max(width) for width in zip(shape[1:2], before.shape[1:2], strict=True)]
        dtype = torch.promote_types(before.dtype, dtype)
        if shape != list(before.shape) or dtype != before.dtype:
            self._memory = _memory(shape, dtype)
            _copy_padded(self._memory[: self.rows], before[: self.rows])
            return self._memory
        return before


def _memory(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=dtype, device="cpu")
    except RuntimeError as error:
        raise MemoryError(
            f"The outputs that an evaluation collects take more memory than the host has ({error}). Keep less of each "
            "batch with preprocess_logits_for_metrics, or pass compute_metrics as a torchmetrics metric, which keeps "
            "no outputs."
        ) from None


def _copy_padded(place: torch.Tensor, rows: torch.Tensor) -> None:
    if rows.shape != place.shape:
        place[:, rows.shape[1] :] = PADDING
        place = place[:, : rows.shape[1]]
    place.copy_(rows)


class _Pieces:
    """Lists of samples, and values that are no tensors, joined at the end."""

    def __init__(self) -> None:
        self._pieces: list[Any] = []

    def write(self, piece: Any) -> None:
        self._pieces.append(convert_to_numpy(piece))

    def joined(self) -> Any:
        self._pieces = [concat_nested(self._pieces)]
        return self._pieces[0]


def _without_rows(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.new_empty((0, *leaf.shape[1:]))
    if isinstance(leaf, SampleList):
        return SampleList()
    return np.atleast_1d(leaf)[:0] if isinstance(leaf, np.ndarray) else leaf


def _bytes_and_place(batch: Any) -> tuple[int, bool]:
    if isinstance(batch, torch.Tensor):
        return batch.nbytes, batch.device.type == "cpu"
    tensors: list[torch.Tensor] = []
    map_nested(lambda leaf: tensors.append(leaf) if isinstance(leaf, torch.Tensor) else None, batch)
    return sum(tensor.nbytes for tensor in tensors), all(tensor.device.type == "cpu" for tensor in tensors)


def _without_unused_storage(leaf: Any) -> Any:
    """Return a copy of a part of a larger tensor, so that the rest can be freed."""
    if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes() > leaf.nbytes:
        return leaf.clone(memory_format=torch.contiguous_format)
    return leaf


def _write(collected: Any, batch: Any) -> None:
    if isinstance(collected, HostRows) and not isinstance(batch, torch.Tensor):
        raise mixed_types_error([torch.Tensor, type(batch)])
    if isinstance(collected, (HostRows, _Pieces)):
        collected.write(batch)
    elif type(collected) is not type(batch):
        raise mixed_types_error([type(collected), type(batch)])
    elif isinstance(collected, Mapping):
        for name, part in collected.items():
            _write(part, batch[name])
    else:
        for part, piece in zip(collected, batch, strict=True):
            _write(part, piece)
