"""`TrainerCallback`: what a user derives from to watch or steer training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

if TYPE_CHECKING:
    from littrainer.callbacks.state import TrainerControl, TrainerState


# What an event may return: the control to go on with, or nothing to keep the one there is.
Steering = Union["TrainerControl", None]


class TrainerCallback:
    """Derive from this class and override the events of interest.

    Each event is called as `event(args, state, control, **kwargs)`: with the training arguments, the `TrainerState`,
    the `TrainerControl`, and by keyword `model`, `processing_class`, `optimizer`, `lr_scheduler`, `train_dataloader`
    and `eval_dataloader`; `on_log` also has `logs`, `on_evaluate` and `on_predict` have `metrics`. An event may change
    the control in place, or return the one to go on with; nothing else may be returned.
    """

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """The Trainer has been constructed."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """Training begins."""

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """Training has ended."""

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """An epoch begins."""

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """An epoch has ended."""

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """The first micro-batch of an optimizer step comes next."""

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """Gradients are accumulated and clipped, the optimizer steps next."""

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """The optimizer has stepped, gradients are not cleared yet."""

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """A micro-batch that does not complete an optimizer step has been accumulated."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """An optimizer step is complete."""

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """An evaluation has ended (`metrics`)."""

    def on_predict(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any, **kwargs: Any
    ) -> Steering:
        """A prediction has ended (`metrics`)."""

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """A checkpoint has been saved."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """Values are logged (`logs`)."""

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """A batch of an evaluation or prediction is done."""

    def on_push_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Steering:
        """A push to the Hub begins."""


EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))
