"""Where two values, the logs of two trainings, or their weights differ: read by `verify`, `compare` and the tests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from littrainer.checkpoint.weights import read_adapter, read_weights

NOT_LOGGED = "not logged"
# Of a value in a message.
LONGEST_TEXT = 200


def first_difference(expected: Any, actual: Any, tolerance: float = 0.0, place: str = "") -> str | None:
    """Say where two values differ first, in words; None if they are equal.

    Types count (1 is not 1.0), a nan equals a nan, and arrays count with their dtype and shape.

    Parameters:
        tolerance: largest absolute difference allowed between two floats, 0 for equality.
        place: where the two values stand, for the message.
    """
    here = place or "the whole value"
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        if expected.dtype != actual.dtype:
            return f"{here}: expected {expected.dtype}, got {actual.dtype}"
        if expected.is_floating_point() and expected.itemsize < 4:
            # NumPy does not know all of them, and float32 holds their numbers.
            expected, actual = expected.float(), actual.float()
        return first_difference(expected.numpy(), actual.numpy(), tolerance, place)
    if type(expected) is not type(actual):
        kinds = type(expected).__name__, type(actual).__name__
        return f"{here}: expected {_short(expected)} ({kinds[0]}), got {_short(actual)} ({kinds[1]})"
    if isinstance(expected, (dict, list, tuple)):
        left, right = (dict(one if isinstance(one, dict) else enumerate(one)) for one in (expected, actual))
        common = [key for key in left if key in right]
        found = (first_difference(left[key], right[key], tolerance, f"{place}[{key!r}]") for key in common)
        missing, surplus = [key for key in left if key not in right], [key for key in right if key not in left]
        keys = f"{here}: missing keys {_short(missing)}, surplus keys {_short(surplus)}" if missing or surplus else None
        return next(filter(None, found), keys)
    if isinstance(expected, (np.ndarray, np.generic)):
        return _difference_of_arrays(np.asarray(expected), np.asarray(actual), tolerance, here)
    if expected == actual:
        return None
    if isinstance(expected, float):
        gap = actual - expected
        is_close = abs(gap) <= tolerance or (math.isnan(expected) and math.isnan(actual))
        return None if is_close else f"{here}: expected {expected!r}, got {actual!r} (difference {gap:.3g})"
    return f"{here}: expected {_short(expected)}, got {_short(actual)}"


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
    first = tuple(int(axis[0]) for axis in np.nonzero(unequal))
    return (
        f"{here}: {int(unequal.sum())} of {expected.size} entries differ by up to {np.nanmax(gap):.3g}; "
        f"first at {first}: expected {expected[first]!r}, got {actual[first]!r}"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 3]}..."


# ---- Logs and weights of two trainings -------------------------------------------------------------------------------

Logs = Mapping[int, Mapping[str, Any]]


class LogComparison(NamedTuple):
    """How many values are equal before the first step with a difference; what differs there; no step if none does."""

    equal: int
    step: int | None
    differing: dict[str, tuple[Any, Any]]


def compare_logs(one: Logs, other: Logs, tolerances: Mapping[str, float], common_only: bool = False) -> LogComparison:
    """Compare two logs, as `Run.logged` has them, step by step.

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


def weights_in(folder: Path) -> Mapping[str, torch.Tensor]:
    """Return the weights, or the adapter, in a folder; numbers are read from the disk when they are used.

    Raises:
        ValueError: a file is damaged, or there is none.
    """
    return read_adapter(folder) if (folder / "adapter_config.json").is_file() else read_weights(folder)


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
