"""Where two values, the logs of two trainings, or their weights differ: read by `verify`, `compare` and the tests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from littrainer.checkpoint.weights import holds_weights, read_adapter, read_weights

NOT_LOGGED = "not logged"


def first_difference(expected: Any, actual: Any, tolerance: float = 0.0, place: str = "") -> str | None:
    """Say where two values differ first, in words; None if they are equal.

    Types count (1 is not 1.0), a nan equals a nan, and arrays are compared by dtype, shape and bits.

    Parameters:
        tolerance: largest absolute difference allowed between two floats, 0 for equality.
        place: where the two values stand, for the message.
    """
    here = place or "the whole value"
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        if expected.dtype is torch.bfloat16 and actual.dtype is torch.bfloat16:
            # NumPy does not know them.
            expected, actual = (
                one.float() if tolerance else one.contiguous().view(torch.int16) for one in (expected, actual)
            )
        return first_difference(expected.numpy(), actual.numpy(), tolerance, place)
    if type(expected) is not type(actual):
        return f"{here}: expected {short(expected)} ({kind(expected)}), got {short(actual)} ({kind(actual)})"
    if isinstance(expected, dict):
        return _difference_of_dicts(expected, actual, tolerance, place)
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
        return _difference_of_arrays(np.asarray(expected), np.asarray(actual), tolerance, here)
    if isinstance(expected, float):
        if expected == actual or (math.isnan(expected) and math.isnan(actual)):
            return None
        if abs(expected - actual) <= tolerance:
            return None
        return f"{here}: expected {expected!r}, got {actual!r} (difference {actual - expected:.3g})"
    return None if expected == actual else f"{here}: expected {short(expected)}, got {short(actual)}"


def _difference_of_dicts(expected: dict[Any, Any], actual: dict[Any, Any], tolerance: float, place: str) -> str | None:
    missing = [key for key in expected if key not in actual]
    surplus = [key for key in actual if key not in expected]
    if missing or surplus:
        return f"{place or 'the whole value'}: missing keys {missing}, surplus keys {surplus}"
    for key, value in expected.items():
        found = first_difference(value, actual[key], tolerance, f"{place}[{key!r}]")
        if found:
            return found
    return None


def _difference_of_arrays(expected: Any, actual: Any, tolerance: float, here: str) -> str | None:
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
    """Return the name of a value's type."""
    return type(value).__name__


def short(value: Any, limit: int = 200) -> str:
    """Return the value's text, cut to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


# ---- Logs and weights of two trainings -------------------------------------------------------------------------------

Logs = Mapping[int, Mapping[str, Any]]


class LogComparison(NamedTuple):
    """How many values are equal before the first step with a difference; what differs there; no step if none does."""

    equal: int
    step: int | None
    differing: dict[str, tuple[Any, Any]]


def compare_logs(one: Logs, other: Logs, tolerances: Mapping[str, float], common_only: bool = False) -> LogComparison:
    """Compare two logs, as `logged_values` returns them, step by step.

    Parameters:
        tolerances: name of a value -> largest difference that is allowed; 0 for others.
        common_only: skip steps and names that only one of them has; otherwise these are differences.
    """
    equal = 0
    for step in sorted(one.keys() & other.keys() if common_only else one.keys() | other.keys()):
        left, right = one.get(step, {}), other.get(step, {})
        names = [name for name in {**left, **right} if not common_only or (name in left and name in right)]
        # What a reader looks at first.
        names.sort(key=lambda name: not name.endswith("loss"))
        pairs = {name: (left.get(name, NOT_LOGGED), right.get(name, NOT_LOGGED)) for name in names}
        differing = {name: pair for name, pair in pairs.items() if first_difference(*pair, tolerances.get(name, 0.0))}
        if differing:
            return LogComparison(equal, step, differing)
        equal += len(pairs)
    return LogComparison(equal, None, {})


def largest_gaps(one: Logs, other: Logs) -> dict[str, float]:
    """Return by how much two logs differ at most: name of a value -> largest absolute difference of its numbers."""
    gaps: dict[str, float] = {}
    for step in one.keys() & other.keys():
        for name, value in one[step].items():
            again = other[step].get(name)
            if isinstance(value, float) and isinstance(again, float) and math.isfinite(value - again):
                gaps[name] = max(gaps.get(name, 0.0), abs(value - again))
    return gaps


def weights_in(folder: Path) -> Mapping[str, torch.Tensor]:
    """Return the weights, or the adapter, in a folder; numbers are read from the disk when they are used.

    Raises:
        ValueError: a file is damaged, or there is none.
    """
    is_adapter = (folder / "adapter_config.json").is_file()
    return read_adapter(folder) if is_adapter and holds_weights(folder) else read_weights(folder)


def weight_gaps(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest absolute difference of each tensor; infinite if one side lacks it, or its shape is another."""
    return {
        name: _largest_gap(one[name], other[name]) if name in one and name in other else math.inf
        for name in {**one, **other}
    }


def _largest_gap(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return math.inf
    if one.dtype == other.dtype and torch.equal(one, other):
        return 0.0
    # In one dtype that holds all of both; a nan at the same place in both is no difference.
    gap = (one.double() - other.double()).abs()
    gap[one.isnan() & other.isnan() | (one == other)] = 0.0
    return float(gap.nan_to_num(nan=math.inf).max()) if gap.numel() else 0.0
