"""Comparison of the logs and weights of two trainings, for `verify` and `compare`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from littrainer.checkpoint.weights import list_adapters, read_adapter, read_weights

NOT_LOGGED = "not logged"
Logs = Mapping[tuple[int, str], Any]


class LogComparison(NamedTuple):
    """Number of equal values before the first differing step (or None), and this step's differing values."""

    equal: int
    step: int | None
    differing: dict[str, tuple[Any, Any]]


def compare_logs(left: Logs, right: Logs, tolerances: Mapping[str, float], common_only: bool = False) -> LogComparison:
    """Compare the logs of two trainings, as in `Run.logged`; values may be dicts of weights.

    Parameters:
        tolerances: allowed differences by name, 0 by default.
        common_only: skip values that only one training logged.
    """
    keys = left.keys() & right.keys() if common_only else left.keys() | right.keys()
    pairs = {key: (left.get(key, NOT_LOGGED), right.get(key, NOT_LOGGED)) for key in keys}
    unequal = [key for key, pair in pairs.items() if not are_equal(*pair, tolerances.get(key[1], 0.0))]
    first = min((step for step, _ in unequal), default=None)
    equal = sum(first is None or step < first for step, _ in pairs)
    unequal.sort(key=lambda key: (not key[1].endswith("loss"), key[1]))
    return LogComparison(equal, first, {key[1]: pairs[key] for key in unequal if key[0] == first})


def are_equal(left: Any, right: Any, tolerance: float = 0.0) -> bool:
    """Return whether values differ by at most a tolerance; a nan equals a nan."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return all(gap <= tolerance for gap in compute_weight_gaps(left, right).values())
    if isinstance(left, float):
        return left == right or abs(left - right) <= tolerance or (math.isnan(left) and math.isnan(right))
    return bool(left == right)


def find_largest_gaps(left: Logs, right: Logs) -> dict[str, float]:
    """Return the largest difference of each float, and of weights, by name; ignore nan."""
    gaps: dict[str, float] = {}
    for key, value in left.items():
        other = right.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            gap = max(compute_weight_gaps(value, other).values(), default=0.0)
        else:
            gap = abs(value - other) if isinstance(value, float) and isinstance(other, float) else 0.0
        if gap > gaps.get(key[1], 0.0):
            gaps[key[1]] = gap
    return gaps


def load_saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights in a folder, or of its adapters.

    Raises:
        ValueError: a file is damaged or missing.
    """
    adapters = [(f"{name}." if name else "", read_adapter(path)) for name, path in list_adapters(folder).items()]
    return {
        f"{prefix}{name}": weight
        for prefix, state in adapters or [("", read_weights(folder))]
        for name, weight in state.items()
        if isinstance(weight, torch.Tensor)
    }


def compute_weight_gaps(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest difference of each tensor; infinite if it is missing or its shape differs."""
    gaps = dict.fromkeys([*left, *right], math.inf)
    for name in left.keys() & right.keys():
        a, b = left[name], right[name]
        if a.dtype == b.dtype and torch.equal(a, b):
            gaps[name] = 0.0
        elif a.shape == b.shape:
            wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
            a, b = a.to(wide), b.to(wide)
            is_same = a.isnan() & b.isnan() | (a == b)
            gap = (a - b).abs().nan_to_num(nan=math.inf).masked_fill(is_same, 0.0)
            gaps[name] = float(gap.max()) if gap.numel() else 0.0
    return gaps
