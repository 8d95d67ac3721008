"""The interface of what watches the optimizer steps of a training, such as the health guard and the signals.

A policy overrides the moments at which it acts. `TrainingStep` collects the overrides once, when a training begins, so
that a training without policies calls nothing for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from littrainer.callbacks.state import TrainerControl, TrainerState


class StepPolicy:
    """The moments of an optimizer step at which a policy can act, in their order."""

    def on_window_begin(self) -> None:
        """Act before the first forward pass of a window."""

    def should_skip_step(self) -> bool:
        """Return whether the optimizer leaves this step out; gradients are complete and clipped."""
        return False

    def on_step_end(self, state: TrainerState, control: TrainerControl, is_epoch_end: bool) -> None:
        """Raise flags of the control; the step is counted, and all processes agree on the flags next."""


MOMENTS = ("on_window_begin", "should_skip_step", "on_step_end")
