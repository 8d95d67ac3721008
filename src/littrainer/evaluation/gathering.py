"""Nested outputs of the batches of an evaluation, put together into arrays."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from littrainer.errors.nested_values import as_numpy, concatenated, different_kinds, map_nested
from littrainer.evaluation.host_rows import HostRows

# Batches of the host are written to the joined array when so much of them has come.
STRETCH_BYTES = 1 << 20


class BatchCollection:
    """Outputs collected over the batches of an evaluation.

    Parameters:
        join: put the batches together; else they stay a list with one entry for each.
        expected_rows: rows of all batches together, where that is known.

    Batches stay on an accelerator until `move_to_host()`. On the host they are written to their place in the joined
    arrays, each of which exists once; small ones a few together.
    """

    def __init__(self, join: bool = True, expected_rows: int | None = None):
        self.join = join
        self.expected_rows = expected_rows
        self._waiting: deque[Any] = deque()
        self._waiting_bytes = 0
        self._joined: Any = None
        self._separate: list[Any] = []

    def add(self, batch: Any) -> None:
        """Take in one batch's nested tensors.

        Raises:
            TypeError, ValueError: it is not built as the batches before it.
        """
        held_bytes, is_on_host = _held_bytes_and_place(batch)
        is_soon_copied = self.join and is_on_host
        self._waiting.append(batch if is_soon_copied else map_nested(_without_unused_storage, batch))
        self._waiting_bytes += held_bytes
        # A large tensor of the host that waited would be held a second time while it is joined.
        if is_soon_copied and self._waiting_bytes >= STRETCH_BYTES:
            self._take_in_waiting()

    def move_to_host(self) -> None:
        """Convert what has been collected to NumPy, which frees the device's memory."""
        self._take_in_waiting()

    def arrays(self) -> Any:
        """All that was collected as NumPy arrays; None where there was nothing."""
        self._join_small_batches()
        if self._joined is None and len(self._waiting) == 1 and self._is_small() and _is_plain_rows(self._waiting[0]):
            # Room for rows that may follow takes longer to set up than a small model to predict these.
            return self._waiting[0].numpy(force=True).copy()
        self.move_to_host()
        if not self.join:
            return self._separate or None
        return None if self._joined is None else map_nested(lambda leaf: leaf.joined(), self._joined)

    def _is_small(self) -> bool:
        return self.join and self._waiting_bytes < 2 * STRETCH_BYTES

    def _join_small_batches(self) -> None:
        if len(self._waiting) > 1 and self._is_small():
            # Many small batches are written faster in one piece.
            self._waiting = deque([concatenated(list(self._waiting))])

    def _take_in_waiting(self) -> None:
        self._join_small_batches()
        self._waiting_bytes = 0
        while self._waiting:
            batch = self._waiting.popleft()
            if not self.join:
                self._separate.append(as_numpy(batch))
                continue
            if self._joined is None:
                self._joined = map_nested(self._leaf_for, batch)
            _write(self._joined, batch)

    def _leaf_for(self, value: Any) -> Any:
        return HostRows(self.expected_rows) if isinstance(value, torch.Tensor) else _Pieces()


class _Pieces:
    """Values that are no tensors, joined at the end."""

    def __init__(self) -> None:
        self._pieces: list[Any] = []

    def write(self, piece: Any) -> None:
        self._pieces.append(piece)

    def joined(self) -> Any:
        self._pieces = [concatenated(self._pieces)]
        return self._pieces[0]


def _held_bytes_and_place(batch: Any) -> tuple[int, bool]:
    """Bytes that nested tensors keep from being freed, and whether all are on the host."""
    if isinstance(batch, torch.Tensor):
        return batch.untyped_storage().nbytes(), batch.device.type == "cpu"
    tensors: list[torch.Tensor] = []
    map_nested(lambda leaf: tensors.append(leaf) if isinstance(leaf, torch.Tensor) else None, batch)
    found = [_held_bytes_and_place(tensor) for tensor in tensors]
    return sum(size for size, _ in found), all(on_host for _, on_host in found)


def _is_plain_rows(batch: Any) -> bool:
    # NumPy has no bfloat16.
    return type(batch) is torch.Tensor and batch.dim() > 0 and batch.dtype != torch.bfloat16


def _without_unused_storage(leaf: Any) -> Any:
    """A part of a larger tensor as a tensor of its own, so that the rest can be freed."""
    if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes() > leaf.nbytes:
        return leaf.clone(memory_format=torch.contiguous_format)
    return leaf


def _write(collected: Any, batch: Any) -> None:
    """Hand each leaf of a batch to what collects it."""
    if isinstance(collected, HostRows):
        if not isinstance(batch, torch.Tensor):
            raise different_kinds([torch.Tensor, type(batch)])
        collected.write(batch)
    elif isinstance(collected, _Pieces):
        collected.write(batch)
    elif type(collected) is not type(batch):
        raise different_kinds([type(collected), type(batch)])
    elif isinstance(collected, Mapping):
        for name, part in collected.items():
            _write(part, batch[name])
    else:
        for part, piece in zip(collected, batch, strict=True):
            _write(part, piece)
