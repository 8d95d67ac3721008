"""Where two values, the logs of two trainings, or their weights differ: read by `verify`, `compare` and the tests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from littrainer.callbacks.log_history import NOT_REPEATED
from littrainer.checkpoint.weights import adapter_folders, read_adapter, read_weights

NOT_LOGGED = "not logged"


def first_difference(expected: Any, actual: Any, tolerance: float = 0.0, place: str = "") -> str | None:
    """Say where two values differ first, in words; None if they are equal.

    Types count (1 is not 1.0), a nan equals a nan, and arrays count with their dtype and shape. Of what is measured, as
    times are, only the name counts.

    Parameters:
        tolerance: largest absolute difference allowed between two floats, 0 for equality.
        place: where the two values stand, for the message.
    """
    here = place or "the whole value"
    are_tensors = isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor)
    if not are_tensors and type(expected) is not type(actual):
        kinds = type(expected).__name__, type(actual).__name__
        return f"{here}: expected {expected!r:.200} ({kinds[0]}), got {actual!r:.200} ({kinds[1]})"
    if isinstance(expected, (dict, list, tuple)):
        left, right = (dict(one if isinstance(one, dict) else enumerate(one)) for one in (expected, actual))
        common = [key for key in left if key in right and not NOT_REPEATED.search(str(key))]
        found = (first_difference(left[key], right[key], tolerance, f"{place}[{key!r}]") for key in common)
        missing, surplus = [key for key in left if key not in right], [key for key in right if key not in left]
        keys = f"{here}: missing keys {missing!r:.200}, surplus keys {surplus!r:.200}" if missing or surplus else None
        return next(filter(None, found), keys)
    one, other = _as_array(expected), _as_array(actual)
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


def _as_array(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # NumPy does not know all small floats, and float32 holds their numbers.
        return (value.float() if value.is_floating_point() and value.itemsize < 4 else value).numpy()
    return np.asarray(value)


# ---- Logs and weights of two trainings -------------------------------------------------------------------------------

Logs = Mapping[tuple[int, str], Any]


class LogComparison(NamedTuple):
    """How many values are equal before the first step with a difference; what differs there; no step if none does."""

    equal: int
    step: int | None
    differing: dict[str, tuple[Any, Any]]


def compare_logs(one: Logs, other: Logs, tolerances: Mapping[str, float], common_only: bool = False) -> LogComparison:
    """Compare what two trainings logged, by step and name, as `Run.logged` has it.

    Parameters:
        tolerances: name of a value -> largest difference that is allowed; 0 for others.
        common_only: skip what only one of them has logged; otherwise these are differences.
    """
    places = one.keys() & other.keys() if common_only else one.keys() | other.keys()
    pairs = {place: (one.get(place, NOT_LOGGED), other.get(place, NOT_LOGGED)) for place in places}
    unequal = {
        (step, name) for (step, name), pair in pairs.items() if first_difference(*pair, tolerances.get(name, 0.0))
    }
    first = min((step for step, _ in unequal), default=None)
    equal = sum(first is None or step < first for step, _ in pairs)
    # The loss is what a reader looks at first.
    names = sorted(
        (name for step, name in unequal if step == first), key=lambda name: (not name.endswith("loss"), name)
    )
    return LogComparison(equal, first, {name: pairs[first, name] for name in names})


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights in a folder, or those of the adapters in it.

    Raises:
        ValueError: a file is damaged, or there is none.
    """
    adapters = [(f"{name}." if name else "", read_adapter(place)) for name, place in adapter_folders(folder).items()]
    # Modules may keep other things besides tensors.
    return {
        f"{adapter}{name}": weight
        for adapter, found in adapters or [("", read_weights(folder))]
        for name, weight in found.items()
        if isinstance(weight, torch.Tensor)
    }


def weight_gaps(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest absolute difference of each tensor; infinite if one side lacks it, or its shape is another."""
    gaps = dict.fromkeys([*one, *other], math.inf)
    for name in one.keys() & other.keys():
        left, right = one[name], other[name]
        if left.dtype == right.dtype and torch.equal(left, right):
            gaps[name] = 0.0
        elif left.shape == right.shape:
            # In a dtype that holds all numbers of both.
            wide = torch.complex128 if left.is_complex() or right.is_complex() else torch.float64
            left, right = left.to(wide), right.to(wide)
            is_same = left.isnan() & right.isnan() | (left == right)
            gap = (left - right).abs().nan_to_num(nan=math.inf).masked_fill(is_same, 0.0)
            gaps[name] = float(gap.max()) if gap.numel() else 0.0
    return gaps
