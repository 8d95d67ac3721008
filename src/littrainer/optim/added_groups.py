"""Parameter groups that join an optimizer while its schedule is running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LambdaLR


def leave_added_groups_alone(schedule: Any) -> None:
    """Let groups that the schedule was not made with keep the learning rate that they are given.

    torch expects a rate for each group of the optimizer, and a schedule has none for those added later.
    """
    if not isinstance(schedule, LambdaLR):
        return
    for group in schedule.optimizer.param_groups[len(schedule.base_lrs) :]:
        schedule.base_lrs.append(1.0)
        schedule.lr_lambdas.append(_rate_of(group))


def _rate_of(group: dict[str, Any]) -> Callable[[int], float]:
    return lambda step: group["lr"]
