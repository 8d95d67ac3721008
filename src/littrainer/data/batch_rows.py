"""Rows of a batch, one for each sample: counted, cut out, put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from littrainer.errors.notes import kind_of
from littrainer.nested_values import map_nested


def check_has_names(batch: Any, model: Any, override: str = "compute_loss") -> None:
    """Refuse a batch without names by which a model can be called, unless a method is overridden.

    Raises:
        TypeError: the batch is no mapping.
    """
    if not hasattr(batch, "keys"):
        given = "None" if batch is None else kind_of(batch)
        raise TypeError(
            f"The batch is {given}, and {type(model).__name__} is called with its entries as keywords: let "
            f"data_collator return a dict such as {{'input_ids': ..., 'labels': ...}}, or override {override}."
        )


def first_dimension(batch: Any) -> int | None:
    """Length of the first dimension of the first tensor found in a nested batch: the samples in it."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() > 0 else None
    if hasattr(batch, "shape"):
        return batch.shape[0] if len(batch.shape) > 0 else None
    values = batch.values() if hasattr(batch, "values") else batch if isinstance(batch, (list, tuple)) else ()
    return next((size for size in map(first_dimension, values) if size is not None), None)


def cut_rows(batch: Any, rows: slice) -> Any:
    """The rows of a batch's tensors and arrays, in memory of their own; anything else is left as it is."""

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            # A view would carry the whole batch with it to another process.
            return leaf[rows].clone()
        return leaf[rows].copy() if isinstance(leaf, np.ndarray) and leaf.ndim else leaf

    return map_nested(cut, batch)


def joined_rows(batches: list[Any]) -> Any:
    """One batch with the rows of all, built as the first one is.

    Raises:
        TypeError, ValueError: the batches are not built alike, or their rows are not equally long.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Mapping):
        return type(first)({name: joined_rows([batch[name] for batch in batches]) for name in first})  # type: ignore[call-arg]
    if isinstance(first, (list, tuple)):
        columns = [joined_rows(list(column)) for column in zip(*batches, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    shapes = {tuple(getattr(batch, "shape", ()))[1:] for batch in batches}
    if len(shapes) > 1:
        raise ValueError(f"rows of the shapes {', '.join(map(str, sorted(shapes)))}")
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
