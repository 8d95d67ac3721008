"""The interface of policies, which watch the optimizer steps of a training, such as the health guard."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from littrainer.callbacks.state import TrainerControl, TrainerState


class StepPolicy:
    """Moments of an optimizer step at which a policy can act, in order; steps call overridden methods only."""

    def on_window_begin(self) -> None:
        """Run before the first forward pass of a window."""

    def should_skip_step(self) -> bool:
        """Return whether to skip the optimizer step; gradients are complete and clipped."""
        return False

    def on_step_end(self, state: TrainerState, control: TrainerControl, is_epoch_end: bool) -> None:
        """Raise flags of the control, before the processes synchronize them."""


MOMENTS = ("on_window_begin", "should_skip_step", "on_step_end")
