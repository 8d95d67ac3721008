"""The differences between the logs of two trainings, and between their weights; for `verify` and `compare`."""

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
    """How many values are equal before the first step with a difference; the differences there; no step if none."""

    equal: int
    step: int | None
    differing: dict[str, tuple[Any, Any]]


def compare_logs(one: Logs, other: Logs, tolerances: Mapping[str, float], common_only: bool = False) -> LogComparison:
    """Compare the logs of two trainings, by step and name, as `Run.logged` has them; weights may be among them.

    Parameters:
        tolerances: name of a value -> largest difference that is allowed; 0 for others.
        common_only: skip values that only one of them has logged; otherwise these are differences.
    """
    places = one.keys() & other.keys() if common_only else one.keys() | other.keys()
    pairs = {place: (one.get(place, NOT_LOGGED), other.get(place, NOT_LOGGED)) for place in places}
    unequal = [place for place, pair in pairs.items() if not are_equal(*pair, tolerances.get(place[1], 0.0))]
    first = min((step for step, _ in unequal), default=None)
    equal = sum(first is None or step < first for step, _ in pairs)
    # The loss is of the greatest interest to a reader.
    unequal.sort(key=lambda place: (not place[1].endswith("loss"), place[1]))
    return LogComparison(equal, first, {place[1]: pairs[place] for place in unequal if place[0] == first})


def are_equal(one: Any, other: Any, tolerance: float = 0.0) -> bool:
    """Whether two logged values, or weights, differ by no more than a tolerance; a nan equals a nan."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return all(gap <= tolerance for gap in weight_gaps(one, other).values())
    if isinstance(one, float):
        return one == other or abs(one - other) <= tolerance or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def largest_gaps(one: Logs, other: Logs) -> dict[str, float]:
    """Return the largest difference of each float, and of weights, that differ; a nan has no size and is left out."""
    gaps: dict[str, float] = {}
    for place, left in one.items():
        right = other.get(place)
        if isinstance(left, dict) and isinstance(right, dict):
            gap = max(weight_gaps(left, right).values(), default=0.0)
        else:
            gap = abs(left - right) if isinstance(left, float) and isinstance(right, float) else 0.0
        if gap > gaps.get(place[1], 0.0):
            gaps[place[1]] = gap
    return gaps


def load_saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights in a folder, or those of the adapters in it.

    Raises:
        ValueError: a file is damaged, or there is none.
    """
    adapters = [(f"{name}." if name else "", read_adapter(place)) for name, place in list_adapters(folder).items()]
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
