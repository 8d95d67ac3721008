"""How many micro-batches an optimizer step takes in each epoch, where Lightning's callback changes it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from littrainer.callbacks.lightning_callbacks import is_one_of
from littrainer.data.limits import further_keywords

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

NAME = "GradientAccumulationScheduler"


class AccumulationSchedule:
    """The schedule of a `GradientAccumulationScheduler`, as a Trainer plans and draws by it.

    Parameters:
        callback: Lightning's callback, or one of a class that derives from it.
    """

    def __init__(self, callback: Any):
        self._callback = callback

    def __call__(self, epoch: int) -> int:
        """Micro-batches of an optimizer step in an epoch, counted from 0."""
        return int(self._callback.get_accumulate_grad_batches(epoch))

    @property
    def largest(self) -> int:
        """The largest number that the schedule names."""
        return max(self._callback.scheduling.values())

    def steps_in(self, epoch: int, micro_batches: int) -> int:
        """Optimizer steps of an epoch of so many micro-batches; a shorter last window counts as a step."""
        return math.ceil(micro_batches / self(epoch))

    def steps_of(self, epochs: float, micro_batches: int) -> int:
        """Optimizer steps of so many epochs, the last one possibly partial."""
        whole = math.floor(epochs)
        steps = sum(self.steps_in(epoch, micro_batches) for epoch in range(whole))
        return steps + math.ceil((epochs - whole) * self.steps_in(whole, micro_batches))

    def place_of(self, steps: int, micro_batches: int) -> tuple[int, int]:
        """The epoch that begins with or holds the step after so many, and the steps of it that are done."""
        epoch = 0
        while steps >= (in_epoch := self.steps_in(epoch, micro_batches)):
            steps -= in_epoch
            epoch += 1
        return epoch, steps


def accumulation_schedule(trainer: Trainer) -> AccumulationSchedule | None:
    """The schedule of a Trainer's callbacks; None where there is none.

    Raises:
        ValueError: there are two.
    """
    among_keywords = further_keywords(trainer).get("callbacks") or []
    others = among_keywords if isinstance(among_keywords, (list, tuple)) else [among_keywords]
    found = [callback for callback in (*trainer.lightning_callbacks, *others) if is_one_of(callback, NAME)]
    if len(found) > 1:
        raise ValueError(f"There are {len(found)} callbacks of the kind {NAME}, and one schedule counts: leave one.")
    return AccumulationSchedule(found[0]) if found else None
