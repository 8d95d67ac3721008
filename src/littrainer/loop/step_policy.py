"""The interface of policies, such as the health guard, which act at fixed moments of each optimizer step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from littrainer.callbacks.state import TrainerControl, TrainerState
    from littrainer.data.windows import MicroBatch


class StepPolicy:
    """Base class of policies, whose methods are called during each optimizer step, in the order below.

    Only overridden methods are called. `record` and `resume` are not called during steps: saves and resumes call them,
    to store and restore a policy's state.

    Attributes:
        next_step_end: earliest `time.monotonic()` at which `on_step_end` is called.
    """

    next_step_end = 0.0

    def on_window_begin(self) -> None:
        """Run before the first forward pass of a window."""

    def forward_and_backward(
        self, micro_batch: MicroBatch, forward: Callable[[Any, Any, Any], torch.Tensor]
    ) -> torch.Tensor:
        """Run forward and backward pass of a micro-batch, which the loop then does not run, and return the loss."""
        raise NotImplementedError

    def should_skip_step(self) -> bool:
        """Return whether to skip the optimizer step; gradients are complete and clipped."""
        return False

    def on_step_end(self, state: TrainerState, control: TrainerControl, is_epoch_end: bool) -> None:
        """Set flags of the control to True, before the processes synchronize them."""

    def restart_intervals(self, has_saved: bool, has_evaluated: bool) -> None:
        """Restart the interval of save_minutes after a save, and that of eval_minutes after an evaluation."""

    def record(self) -> dict[str, Any]:
        """Return entries of the resume record."""
        return {}

    def resume(self, record: Mapping[str, Any], is_same_data: bool) -> None:
        """Restore the entries of a resume record; positions in the data are restored only if the data is the same."""


POLICY_METHODS = (
    *("on_window_begin", "forward_and_backward", "should_skip_step", "on_step_end", "restart_intervals"),
    *("record", "resume"),
)


def group_by_method(policies: Iterable[StepPolicy | None]) -> Mapping[str, list[StepPolicy]]:
    """Return, for the name of each method of `StepPolicy`, the policies that override it."""
    acting: defaultdict[str, list[StepPolicy]] = defaultdict(list)
    for policy in filter(None, policies):
        for moment in POLICY_METHODS:
            if getattr(type(policy), moment) is not getattr(StepPolicy, moment):
                acting[moment].append(policy)
    return acting
