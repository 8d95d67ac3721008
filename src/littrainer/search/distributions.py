"""What a hyperparameter was drawn from, as plain data that a record can hold."""

from __future__ import annotations

import math
from typing import Any

from littrainer.search.record import plain

FLOAT, INTEGER, CATEGORICAL = "float", "int", "categorical"


def of_optuna(distribution: Any) -> dict[str, Any]:
    """One of Optuna's distributions.

    Returns:
        `{"kind": "categorical", "choices": [...]}`, or `{"kind": "float" or "int", "low", "high", "log", "step"}` with
        both ends included and `step` None where any number between them may be drawn.
    """
    if hasattr(distribution, "choices"):
        return {"kind": CATEGORICAL, "choices": plain(list(distribution.choices))}
    kind = INTEGER if type(distribution).__name__.startswith("Int") else FLOAT
    return _range(kind, distribution.low, distribution.high, bool(distribution.log), distribution.step)


def of_ray(domain: Any) -> dict[str, Any] | None:
    """One entry of Ray Tune's search space, as `of_optuna` gives it.

    Returns:
        None for a constant, a normal distribution, and a function that draws.
    """
    if isinstance(domain, dict) and list(domain) == ["grid_search"]:
        return {"kind": CATEGORICAL, "choices": plain(list(domain["grid_search"]))}
    if hasattr(domain, "categories"):
        return {"kind": CATEGORICAL, "choices": plain(list(domain.categories))}
    # Texts have something that is called `lower`, too.
    if not (hasattr(domain, "get_sampler") and hasattr(domain, "lower") and hasattr(domain, "upper")):
        return None
    low, high = domain.lower, domain.upper
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    sampler = domain.get_sampler()
    # A quantized one wraps the one that says how numbers are spread.
    step = getattr(sampler, "q", None)
    spread = type(getattr(sampler, "sampler", None) or sampler).__name__
    if type(domain).__name__ == "Integer":
        # Ray excludes the upper end of integers, but for those that it rounds to multiples.
        return _range(INTEGER, low, high if step else high - 1, "Log" in spread, step or 1)
    return _range(FLOAT, low, high, "Log" in spread, step)


def _range(kind: str, low: float, high: float, log: bool, step: float | None) -> dict[str, Any]:
    return {"kind": kind, "low": plain(low), "high": plain(high), "log": log, "step": plain(step)}
