"""Nested outputs of the batches of an evaluation, put together into arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

PADDING = -100


def map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to each leaf of nested lists, tuples and mappings."""
    if isinstance(value, Mapping):
        return type(value)({name: map_nested(function, item) for name, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_nested(function, item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_nested(function, item) for item in value)
    return function(value)


def detached(value: Any) -> Any:
    """Nested tensors without their graph; anything else is left as it is."""
    return map_nested(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, value)


def truncated(value: Any, length: int) -> Any:
    """Nested tensors with at most `length` rows."""
    return map_nested(lambda leaf: leaf[:length] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf, value)


def as_numpy(value: Any) -> Any:
    """Nested tensors as NumPy arrays on the host; NumPy has no bfloat16, which becomes float32."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.detach().cpu()
        return (leaf.float() if leaf.dtype == torch.bfloat16 else leaf).numpy()

    return map_nested(convert, value)


def concatenated(pieces: list[Any]) -> Any:
    """Join nested arrays or tensors along their rows; second dimensions of unequal length are padded with -100.

    Raises:
        TypeError: the pieces are not built alike.
    """
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if any(type(piece) is not type(first) for piece in pieces):
        kinds = sorted({type(piece).__name__ for piece in pieces})
        raise TypeError(
            f"The batches of an evaluation returned outputs of different kinds ({', '.join(kinds)}), which cannot be "
            "joined. Let the model return the same structure for every batch, or set eval_do_concat_batches=False."
        )
    if isinstance(first, Mapping):
        return type(first)({name: concatenated([piece[name] for piece in pieces]) for name in first})  # type: ignore[call-arg]
    if isinstance(first, (list, tuple)):
        columns = [concatenated(list(column)) for column in zip(*pieces, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    if isinstance(first, torch.Tensor):
        return torch.cat(_padded([torch.atleast_1d(piece) for piece in pieces], torch.Tensor.new_full), dim=0)
    if isinstance(first, np.ndarray):
        return np.concatenate(_padded([np.atleast_1d(piece) for piece in pieces], _numpy_full), axis=0)
    raise TypeError(f"Outputs of type {type(first).__name__} cannot be joined across batches; return tensors.")


def _numpy_full(like: np.ndarray, shape: tuple[int, ...], fill: int) -> np.ndarray:
    return np.full(shape, fill, dtype=like.dtype)


def _padded(pieces: list[Any], full: Callable[[Any, tuple[int, ...], int], Any]) -> list[Any]:
    if pieces[0].ndim == 1 or len({piece.shape[1] for piece in pieces}) == 1:
        return pieces
    width = max(piece.shape[1] for piece in pieces)
    padded = []
    for piece in pieces:
        wide = full(piece, (piece.shape[0], width, *piece.shape[2:]), PADDING)
        wide[:, : piece.shape[1]] = piece
        padded.append(wide)
    return padded


class BatchCollection:
    """Outputs collected over the batches of an evaluation.

    Parameters:
        join: put the batches together; else they stay a list with one entry for each.

    Batches are kept on the device until `move_to_host()`, and joined once, at the end.
    """

    def __init__(self, join: bool = True):
        self.join = join
        self._on_device: list[Any] = []
        self._on_host: list[Any] = []

    def add(self, batch: Any) -> None:
        """Take in one batch's nested tensors."""
        self._on_device.append(batch)

    def move_to_host(self) -> None:
        """Convert what has been collected to NumPy, which frees the device's memory."""
        if not self._on_device:
            return
        if self.join:
            self._on_host.append(as_numpy(concatenated(self._on_device)))
        else:
            self._on_host.extend(as_numpy(batch) for batch in self._on_device)
        self._on_device = []

    def arrays(self) -> Any:
        """All that was collected as NumPy arrays; None where there was nothing."""
        self.move_to_host()
        if not self._on_host:
            return None
        if self.join:
            self._on_host = [concatenated(self._on_host)]
            return self._on_host[0]
        return self._on_host
