"""Finding the first place where two records differ."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch


def first_difference(expected: Any, actual: Any, tolerance: float = 0.0, place: str = "") -> str | None:
    """Where two values differ first, in words; None where they are equal.

    Types count (1 is not 1.0), a nan equals a nan, and arrays are compared by dtype, shape and bits.

    Parameters:
        expected: transformers' value.
        actual: our value.
        tolerance: largest absolute difference allowed between two floats, 0 for equality.
        place: where the two values stand, for the message.
    """
    here = place or "the whole value"
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        if expected.dtype is torch.bfloat16 and actual.dtype is torch.bfloat16:
            expected, actual = expected.view(torch.int16), actual.view(torch.int16)
        return first_difference(expected.numpy(), actual.numpy(), tolerance, place)
    if type(expected) is not type(actual):
        return f"{here}: expected {short(expected)} ({kind(expected)}), got {short(actual)} ({kind(actual)})"
    if isinstance(expected, dict):
        return difference_of_dicts(expected, actual, tolerance, place)
    if isinstance(expected, (list, tuple)):
        for index, (left, right) in enumerate(zip(expected, actual, strict=False)):
            found = first_difference(left, right, tolerance, f"{place}[{index}]")
            if found:
                return found
        if len(expected) != len(actual):
            longer = expected if len(expected) > len(actual) else actual
            surplus = short(longer[min(len(expected), len(actual))])
            return f"{here}: expected {len(expected)} entries, got {len(actual)}; first surplus entry: {surplus}"
        return None
    if isinstance(expected, (np.ndarray, np.generic)):
        return difference_of_arrays(np.asarray(expected), np.asarray(actual), tolerance, here)
    if isinstance(expected, float):
        if expected == actual or (math.isnan(expected) and math.isnan(actual)):
            return None
        if abs(expected - actual) <= tolerance:
            return None
        return f"{here}: expected {expected!r}, got {actual!r} (difference {actual - expected:.3g})"
    return None if expected == actual else f"{here}: expected {short(expected)}, got {short(actual)}"


def difference_of_dicts(expected: dict[Any, Any], actual: dict[Any, Any], tolerance: float, place: str) -> str | None:
    missing = [key for key in expected if key not in actual]
    surplus = [key for key in actual if key not in expected]
    if missing or surplus:
        return f"{place or 'the whole value'}: missing keys {missing}, surplus keys {surplus}"
    for key, value in expected.items():
        found = first_difference(value, actual[key], tolerance, f"{place}[{key!r}]")
        if found:
            return found
    return None


def difference_of_arrays(expected: Any, actual: Any, tolerance: float, here: str) -> str | None:
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return f"{here}: expected {expected.dtype}{expected.shape}, got {actual.dtype}{actual.shape}"
    if expected.dtype == object:
        return first_difference(expected.tolist(), actual.tolist(), tolerance, here)
    if expected.tobytes() == actual.tobytes():
        return None
    if expected.dtype.kind != "f":
        return f"{here}: {int((expected != actual).sum())} of {expected.size} entries differ"
    gap = np.abs(expected.astype(np.float64) - actual.astype(np.float64))
    unequal = ~((expected == actual) | (np.isnan(expected) & np.isnan(actual)) | (gap <= tolerance))
    if not unequal.any():
        return None
    where = tuple(int(axis[0]) for axis in np.nonzero(unequal))
    largest = f"{np.nanmax(gap):.3g}"
    return (
        f"{here}: {int(unequal.sum())} of {expected.size} entries differ by up to {largest}; "
        f"first at {where}: expected {expected[where]!r}, got {actual[where]!r}"
    )


def kind(value: Any) -> str:
    return type(value).__name__


def short(value: Any, limit: int = 200) -> str:
    """The value's text, cut to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
