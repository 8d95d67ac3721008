"""Names and values of metrics as trackers get them."""

from __future__ import annotations

import logging
import numbers
from typing import Any

logger = logging.getLogger(__name__)

# Splits whose metrics carry their name as a prefix; all else belongs to the training.
PREFIXED_SPLITS = ("eval", "test")

# Results of a whole training: some services keep them as the summary of the run and not as a curve.
SUMMARY_VALUES = (
    "train_loss",
    "total_flos",
    "train_runtime",
    *(f"train_{unit}_per_second" for unit in ("samples", "steps")),
)

# What has been warned about: service and name.
_told: set[tuple[str, str]] = set()


def tracked_name(name: str) -> str:
    """A metric's name with its split in front: `loss` is `train/loss`, `eval_accuracy` is `eval/accuracy`."""
    for split in PREFIXED_SPLITS:
        if name.startswith(f"{split}_"):
            return f"{split}/{name.removeprefix(f'{split}_')}"
    return f"train/{name}"


def with_tracked_names(logs: dict[str, Any]) -> dict[str, Any]:
    """Logged values under the names that trackers show."""
    return {tracked_name(name): value for name, value in logs.items()}


def as_number(value: Any) -> float | int | None:
    """A value as a plain number: tensors and arrays of one number too; None for everything else."""
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, numbers.Real):
        return float(value)
    if getattr(value, "size", None) == 1 or (hasattr(value, "numel") and value.numel() == 1):
        number = value.item()
        return number if isinstance(number, (int, float)) else None
    return None


def only_numbers(logs: dict[str, Any], service: str) -> dict[str, float | int]:
    """The values that a service can draw as curves; each other one is named in a warning, once.

    Parameters:
        service: the service's name, for the warning.
    """
    found = {}
    for name, value in logs.items():
        number = as_number(value)
        if number is None:
            warn_of_left_out(service, name, value)
        else:
            found[name] = number
    return found


def warn_of_left_out(service: str, name: str, value: Any) -> None:
    """Say once for each service and name that a value is not reported, since it is no number."""
    if (service, name) not in _told:
        _told.add((service, name))
        logger.warning(
            "%s: the logged value %r is left out, since it is a %s and no number: %.80r.",
            service,
            name,
            type(value).__name__,
            value,
        )
