"""Rows of batches, written one below the other into memory of the host.

An evaluation's arrays can be as large as the machine allows, so they exist once: a batch is written to its place when
it comes, and nothing is joined by making a second copy.
"""

from __future__ import annotations

import functools
import math
import mmap
from typing import Any

import numpy as np
import torch

from littrainer.errors.nested_values import PADDING, different_shapes

# From this size on memory is mapped, so that its pages can be given back one by one; smaller blocks are not worth it.
MAPPED_FROM_BYTES = 1 << 20
# How much is copied before the pages it came from are given back.
SLICE_BYTES = 8 << 20


class HostRows:
    """Tensors collected row by row; second dimensions of unequal length are padded with -100.

    Parameters:
        expected_rows: how many there will be, where that is known. More or fewer may come; memory that is never
            written to costs nothing.

    Where the rows are as many as expected and none is longer than those before it, they are written into the final
    array at once. Else they are collected in several blocks, which are given back while they are copied into it.
    """

    def __init__(self, expected_rows: int | None = None):
        self.expected_rows = expected_rows
        self.rows = 0
        self._blocks: list[_Block] = []
        self._is_one_number = False

    def write(self, piece: torch.Tensor) -> None:
        """Take in the rows of one batch, from any device; a single number counts as one row.

        Raises:
            ValueError: the rows differ from those before in more than their second dimension.
            MemoryError: the host has no room for them.
        """
        self._is_one_number = self.rows == 0 and piece.dim() == 0
        piece = torch.atleast_1d(piece.detach())
        block = self._blocks[-1] if self._blocks else None
        if block is not None:
            block.check(piece)
        if block is None or not block.takes(piece):
            known = 0 if self._blocks else self.expected_rows or 0
            block = self._new_block(piece, max(len(piece), known, self.rows))
            self._blocks.append(block)
        block.write(piece)
        self.rows += len(piece)

    def joined(self) -> np.ndarray:
        """All rows as one array, which shares its memory with this collection."""
        if len(self._blocks) > 1:
            self._join_blocks()
        (block,) = self._blocks
        rows = block.array[: block.filled]
        return rows.reshape(()) if self._is_one_number else rows

    def _new_block(self, piece: torch.Tensor, capacity: int) -> _Block:
        # A number of rows that is only guessed must not fail where fewer would do.
        while True:
            try:
                return _Block(piece.dtype, (capacity, *piece.shape[1:]))
            except (MemoryError, OSError, OverflowError):
                if capacity <= len(piece):
                    raise MemoryError(_too_large(self._blocks, piece)) from None
                capacity = max(capacity // 2, len(piece))

    def _join_blocks(self) -> None:
        first = self._blocks[0]
        dtype = first.dtype
        for block in self._blocks:
            dtype = torch.promote_types(dtype, block.dtype)
        widths = [block.tensor.shape[1] for block in self._blocks if block.tensor.dim() > 1]
        shape = (self.rows, *([max(widths)] if widths else []), *first.tensor.shape[2:])
        try:
            whole = _Block(dtype, shape)
        except (MemoryError, OSError):
            raise MemoryError(_too_large(self._blocks)) from None
        blocks, self._blocks = self._blocks, [whole]
        while blocks:
            blocks.pop(0).pour_into(whole)


class _Block:
    """Room for rows of one shape and kind."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]):
        self.dtype = dtype
        kind = _numpy_kind(dtype)
        count = math.prod(shape)
        self._memory = _untouched_memory(count * kind.itemsize)
        self.array = np.frombuffer(self._memory, dtype=kind, count=count).reshape(shape)
        self.tensor = torch.from_numpy(self.array)
        self.filled = 0

    def check(self, piece: torch.Tensor) -> None:
        if piece.dim() != self.tensor.dim() or piece.shape[2:] != self.tensor.shape[2:]:
            raise ValueError(different_shapes((self.filled, *self.tensor.shape[1:]), tuple(piece.shape)))

    def takes(self, piece: torch.Tensor) -> bool:
        """Whether a batch fits in below the others."""
        is_narrow = piece.dim() == 1 or piece.shape[1] <= self.tensor.shape[1]
        return is_narrow and self.filled + len(piece) <= len(self.tensor) and piece.dtype == self.dtype

    def write(self, piece: torch.Tensor) -> None:
        place = self.tensor[self.filled : self.filled + len(piece)]
        if piece.shape == place.shape:
            place.copy_(piece)
        else:
            place[:, : piece.shape[1]].copy_(piece)
            place[:, piece.shape[1] :] = PADDING
        self.filled += len(piece)

    def pour_into(self, other: _Block) -> None:
        """Copy the rows below those of another block, and give their memory back along the way."""
        row_bytes = max(self.array.nbytes // max(len(self.array), 1), 1)
        step = max(SLICE_BYTES // row_bytes, 1)
        for start in range(0, self.filled, step):
            end = min(start + step, self.filled)
            other.write(self.tensor[start:end])
            _give_back(self._memory, start * row_bytes, end * row_bytes)


@functools.cache
def _numpy_kind(dtype: torch.dtype) -> np.dtype[Any]:
    # NumPy has no bfloat16.
    return torch.empty(0, dtype=torch.float32 if dtype == torch.bfloat16 else dtype).numpy().dtype


def _untouched_memory(size: int) -> Any:
    """Writable memory of which a page exists only once it has been written to."""
    if size < MAPPED_FROM_BYTES:
        return np.empty(max(size, 1), dtype=np.uint8)
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, size)


def _give_back(memory: Any, start: int, end: int) -> None:
    """Let the system have pages of mapped memory that are not read again; those before them are given back already."""
    start, end = (position // mmap.PAGESIZE * mmap.PAGESIZE for position in (start, end))
    if isinstance(memory, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED") and end > start:
        memory.madvise(mmap.MADV_DONTNEED, start, end - start)


def _too_large(blocks: list[_Block], piece: torch.Tensor | None = None) -> str:
    size = sum(block.array[: block.filled].nbytes for block in blocks)
    size += 0 if piece is None else piece.nbytes
    return (
        f"The outputs that an evaluation has collected take {size / 2**30:.2f} GiB, and the host has no room for them. "
        "Keep less of each batch with preprocess_logits_for_metrics, or pass compute_metrics as a torchmetrics metric, "
        "which keeps no outputs."
    )
