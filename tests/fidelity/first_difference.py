"""The strict comparison of two values, which names the first place with a difference."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from littrainer.callbacks.log_history import NOT_REPEATED


def first_difference(expected: Any, actual: Any, tolerance: float = 0.0, place: str = "") -> str | None:
    """Return where two values differ first, in words; None if they are equal.

    Types count (1 is not 1.0), a nan equals a nan, and arrays count with dtype and shape. Times and memory may differ.

    Parameters:
        tolerance: largest absolute difference allowed between two floats.
        place: position of the two values, for the message.
    """
    here = place or "the whole value"
    are_tensors = isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor)
    if not are_tensors and type(expected) is not type(actual):
        kinds = type(expected).__name__, type(actual).__name__
        return f"{here}: expected {expected!r:.200} ({kinds[0]}), got {actual!r:.200} ({kinds[1]})"
    if isinstance(expected, (dict, list, tuple)):
        left, right = (dict(one if isinstance(one, dict) else enumerate(one)) for one in (expected, actual))
        common = [key for key in left if key in right and not NOT_REPEATED.search(str(key))]
        results = (first_difference(left[key], right[key], tolerance, f"{place}[{key!r}]") for key in common)
        missing, surplus = [key for key in left if key not in right], [key for key in right if key not in left]
        keys = f"{here}: missing keys {missing!r:.200}, surplus keys {surplus!r:.200}" if missing or surplus else None
        return next(filter(None, results), keys)
    one, other = _to_array(expected), _to_array(actual)
    dtypes = getattr(expected, "dtype", None), getattr(actual, "dtype", None)
    if one.shape != other.shape or dtypes[0] != dtypes[1]:
        return f"{here}: expected {dtypes[0]}{one.shape}, got {dtypes[1]}{other.shape}"
    if one.dtype == object and one.ndim:
        return first_difference(one.tolist(), other.tolist(), tolerance, here)
    unequal, gaps = np.asarray(one != other, bool), None
    if one.dtype.kind == "f" and unequal.any():
        gaps = np.abs(one.astype(np.float64) - other.astype(np.float64))
        unequal &= ~(np.isnan(one) & np.isnan(other) | (gaps <= tolerance))
    if not unequal.any():
        return None
    first = tuple(map(int, np.argwhere(unequal)[0]))
    gap = "" if gaps is None else f" (difference up to {gaps[unequal].max():.3g})"
    entries = f"{int(unequal.sum())} of {one.size} entries differ, first at {first}: " if one.ndim else ""
    return f"{here}: {entries}expected {one.item(first)!r:.200}, got {other.item(first)!r:.200}{gap}"


def _to_array(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # NumPy does not know all small floats, and float32 holds their numbers.
        return (value.float() if value.is_floating_point() and value.itemsize < 4 else value).numpy()
    return np.asarray(value)
