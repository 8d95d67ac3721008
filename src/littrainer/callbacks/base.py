"""`TrainerCallback`: base class of callbacks that watch or steer training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

if TYPE_CHECKING:
    from littrainer.callbacks.state import TrainerControl, TrainerState


# None keeps the current control.
Steering = Union["TrainerControl", None]


class TrainerCallback:
    """Base class of callbacks: derive from it and override the events of interest.

    Each event is called as `event(args, state, control, **kwargs)`: with the training arguments, the `TrainerState`,
    the `TrainerControl`, and by keyword `model`, `processing_class`, `optimizer`, `lr_scheduler`, `train_dataloader`
    and `eval_dataloader`; `on_log` also has `logs`, `on_evaluate` and `on_predict` have `metrics`. An event may change
    the control in place or return a new control, and nothing else.

    Examples:
        >>> from littrainer import TrainerCallback
        >>> class StopAtLowLoss(TrainerCallback):
        ...     def on_log(self, args, state, control, logs=None, **kwargs):
        ...         control.should_training_stop = logs.get("loss", 1.0) < 0.1
    """

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """Run after the Trainer is constructed."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """Run when training begins."""

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """Run when training has ended."""

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """Run when an epoch begins."""

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """Run when an epoch has ended."""

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """Run before the first micro-batch of an optimizer step."""

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """Run before the optimizer steps, after gradients are accumulated and clipped."""

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """Run after the optimizer has stepped, before gradients are cleared."""

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """Run after a micro-batch that does not complete an optimizer step."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """Run after an optimizer step."""

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """Run after an evaluation (`metrics`)."""

    def on_predict(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any, **kwargs: Any
    ) -> Steering:
        """Run after a prediction (`metrics`)."""

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """Run after a checkpoint is saved."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """Run when values are logged (`logs`)."""

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """Run after a batch of an evaluation or prediction."""

    def on_push_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """Run when a push to the Hub begins."""


EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))
