"""Shares of a collection, one for each process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def share_of(inputs: Any, index: int, count: int, pad: bool = False) -> Any:
    """One of `count` shares of a collection; the first ones get one entry more where it does not divide evenly.

    Parameters:
        inputs: a list, tuple, tensor, dataset with `select`, or a mapping whose values are split alike. With one share,
            and for anything else, it is returned as it is.
        index: which share, from 0.
        pad: repeat the last entry until all shares are equally long.

    Raises:
        ValueError: the values of a mapping differ in length.
    """
    if count == 1:
        return inputs
    if isinstance(inputs, Mapping):
        lengths = {name: len(value) for name, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"split_between_processes needs values of equal length in a dict, and got {lengths}.")
        return type(inputs)({name: share_of(value, index, count, pad) for name, value in inputs.items()})  # type: ignore[call-arg]
    if not (isinstance(inputs, (list, tuple, torch.Tensor)) or callable(getattr(inputs, "select", None))):
        return inputs
    rows = _rows(len(inputs), index, count, pad)
    if isinstance(inputs, torch.Tensor):
        return inputs[rows]
    if isinstance(inputs, (list, tuple)):
        return type(inputs)(inputs[row] for row in rows)
    return inputs.select(rows)


def _rows(length: int, index: int, count: int, pad: bool) -> list[int]:
    each, further = divmod(length, count)
    start = index * each + min(index, further)
    rows = list(range(start, start + each + (index < further)))
    longest = each + (further > 0)
    return rows + [length - 1] * (longest - len(rows)) if pad and length else rows
