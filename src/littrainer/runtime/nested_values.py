"""Functions on nested lists, tuples and mappings of tensors or arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

# Padding of second dimensions, which losses and metrics ignore.
PADDING = -100


class SampleList(list[Any]):
    """A list with an entry for each sample; lists of several batches are concatenated."""


def is_sample_list(value: Any) -> bool:
    return isinstance(value, SampleList)


def map_nested(function: Callable[[Any], Any], value: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Apply a function to each leaf of nested lists, tuples and mappings, and to containers for which `is_leaf`."""
    if is_leaf is not None and is_leaf(value):
        return function(value)
    if isinstance(value, Mapping):
        items = {name: map_nested(function, item, is_leaf) for name, item in value.items()}
        return type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_nested(function, item, is_leaf) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_nested(function, item, is_leaf) for item in value)
    return function(value)


def detach_nested(value: Any) -> Any:
    return map_nested(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, value)


def truncate_nested(value: Any, length: int) -> Any:
    def cut(leaf: Any) -> Any:
        if isinstance(leaf, SampleList):
            return SampleList(leaf[:length])
        return leaf[:length] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf

    return map_nested(cut, value, is_sample_list)


def convert_to_numpy(value: Any) -> Any:
    """Convert nested tensors, with bfloat16 as float32."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.detach().cpu()
        return (leaf.float() if leaf.dtype == torch.bfloat16 else leaf).numpy()

    return map_nested(convert, value)


def concat_nested(pieces: list[Any]) -> Any:
    """Concatenate nested arrays or tensors along rows; pad unequal second dimensions with -100."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if any(type(piece) is not type(first) for piece in pieces):
        raise mixed_types_error([type(piece) for piece in pieces])
    if isinstance(first, SampleList):
        return SampleList(itertools.chain(*pieces))
    if isinstance(first, (Mapping, list, tuple)):
        _check_entries(first, pieces[1:])
    if isinstance(first, Mapping):
        return type(first)({name: concat_nested([piece[name] for piece in pieces]) for name in first})  # type: ignore[call-arg]
    if isinstance(first, (list, tuple)):
        columns = [concat_nested(list(column)) for column in zip(*pieces, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    if isinstance(first, torch.Tensor):
        rows = [piece if piece.dim() else piece.reshape(1) for piece in pieces]
        return torch.cat(_pad(rows, torch.Tensor.new_full), dim=0)
    if isinstance(first, np.ndarray):
        rows = [np.atleast_1d(piece) for piece in pieces]
        return np.concatenate(_pad(rows, lambda like, shape, fill: np.full(shape, fill, like.dtype)), axis=0)
    raise TypeError(
        f"Outputs of type {type(first).__name__} cannot be joined across batches. Let the model return tensors, and "
        "name its other outputs in ignore_keys, which leaves them out; or set eval_do_concat_batches=False."
    )


def _check_entries(first: Any, others: list[Any]) -> None:
    is_mapping = isinstance(first, Mapping)
    for other in others:
        if first.keys() - other.keys() if is_mapping else len(first) != len(other):
            entries, other_entries = (sorted(map(str, part)) if is_mapping else len(part) for part in (first, other))
            raise ValueError(
                f"The batches of an evaluation returned a {type(first).__name__} with the entries {entries}, and "
                f"with {other_entries}, which cannot be joined. Let the model return the same structure for every "
                "batch, or set eval_do_concat_batches=False."
            )


def mixed_types_error(kinds: list[type]) -> TypeError:
    names = sorted({kind.__name__ for kind in kinds})
    return TypeError(
        f"The batches of an evaluation returned outputs of different kinds ({', '.join(names)}), which cannot be "
        "joined. Let the model return the same structure for every batch, or set eval_do_concat_batches=False."
    )


def _pad(pieces: list[Any], full: Callable[[Any, tuple[int, ...], int], Any]) -> list[Any]:
    for piece in pieces:
        if piece.ndim != pieces[0].ndim or piece.shape[2:] != pieces[0].shape[2:]:
            raise ValueError(mixed_shapes_message(tuple(pieces[0].shape), tuple(piece.shape)))
    if pieces[0].ndim == 1 or len({piece.shape[1] for piece in pieces}) == 1:
        return pieces
    width = max(piece.shape[1] for piece in pieces)
    padded = []
    for piece in pieces:
        wide = full(piece, (piece.shape[0], width, *piece.shape[2:]), PADDING)
        wide[:, : piece.shape[1]] = piece
        padded.append(wide)
    return padded


def mixed_shapes_message(before: tuple[int, ...], now: tuple[int, ...]) -> str:
    return (
        f"A batch of an evaluation returned an output of shape {now}, and one before it of shape {before}: only the "
        "first two dimensions may differ. Bring them to one shape in preprocess_logits_for_metrics, or set "
        "eval_do_concat_batches=False."
    )


def describe(value: Any) -> str:
    """Return dtypes and shapes in a line."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {describe(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of [{', '.join(map(describe, value))}]"
    return type(value).__name__
