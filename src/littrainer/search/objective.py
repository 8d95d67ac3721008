"""The number, or the numbers, that a search minimizes or maximizes."""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Sequence
from functools import cache
from typing import Any

from littrainer.errors.notes import kind_of
from littrainer.search.failures import ObjectiveIsNan, SearchMistake

logger = logging.getLogger(__name__)

# Entries of an evaluation that say nothing about how good the model is; transformers adds up the latter ones.
ENDINGS_OF_SPEED = ("epoch", "_runtime", "_per_second")
PARTS_OF_SIZES = ("num_input_tokens_seen", "_model_preparation_time", "_mem_cpu_", "_mem_gpu_")


def default_compute_objective(metrics: dict[str, float]) -> float:
    """What a search goes by where nothing else is given: the evaluation loss, or the sum of all metrics if there are.

    Parameters:
        metrics: what `evaluate()` returned; speed, memory, tokens seen and the epoch are no metrics.
    """
    measures = {name: value for name, value in metrics.items() if not name.endswith(ENDINGS_OF_SPEED)}
    sizes = [name for name in measures if any(part in name for part in PARTS_OF_SIZES)]
    for name in sizes:
        del measures[name]
        _tell_of_size(name)
    loss = measures.pop("eval_loss", None)
    return sum(measures.values()) if measures else loss  # type: ignore[return-value]


@cache
def _tell_of_size(name: str) -> None:
    logger.warning("The default objective leaves %s out; in transformers it counts as a metric.", name)


def checked_objective(value: Any, directions: Sequence[str]) -> float | list[float]:
    """What `compute_objective` returned, as Python's numbers; one that is nan is let through.

    Parameters:
        directions: one for each objective.

    Returns:
        a number for one direction, else a list of them.

    Raises:
        SearchMistake: it is no number, or there are more or fewer than directions.
    """
    several = isinstance(value, (list, tuple)) or getattr(value, "shape", ()) not in ((), None)
    found = [_number(one) for one in value] if several else [_number(value)]
    if len(found) != len(directions):
        raise SearchMistake(
            f"compute_objective returned {_counted(len(found), 'number')} ({value!r}), and direction names "
            f"{len(directions)} ({', '.join(directions)}): give as many directions as there are objectives."
        )
    return found if len(directions) > 1 else found[0]


def refuse_nan(objective: float | list[float]) -> None:
    """Let a trial fail whose last objective is not a number.

    Raises:
        ObjectiveIsNan: it is nan, or one of several is.
    """
    for value in objective if isinstance(objective, list) else [objective]:
        if math.isnan(value):
            where = f" ({objective})" if isinstance(objective, list) else ""
            raise ObjectiveIsNan(f"the objective is nan{where}")


def _number(value: Any) -> float:
    plain = value.item() if callable(getattr(value, "item", None)) and getattr(value, "shape", None) == () else value
    if not isinstance(plain, numbers.Real):
        raise SearchMistake(
            f"compute_objective returned {plain!r} ({kind_of(plain)}); it has to return a number, or a list of as many "
            "numbers as there are directions."
        )
    return float(plain)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
