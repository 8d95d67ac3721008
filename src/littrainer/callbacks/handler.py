"""`CallbackHandler`: calls each callback at each event, in order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from littrainer.callbacks.base import TrainerCallback, listens_to
from littrainer.callbacks.checks import check_answer, new_callback
from littrainer.callbacks.flow import DefaultFlowCallback
from littrainer.callbacks.state import ControlSwitchError, TrainerControl
from littrainer.errors.lazy_isinstance import is_a
from littrainer.errors.notes import add_note

logger = logging.getLogger(__name__)

# What each event is given by keyword, read from the handler.
OFFERED = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
read_offered = attrgetter(*OFFERED)
# How the note begins that an error of a callback is given.
FROM_CALLBACK = "It came from the callback"


def _forwarded(event: str, *cleared: str) -> Callable[..., TrainerControl]:
    """Make the handler's method for an event; it first clears switches of the control."""

    def call(self: CallbackHandler, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        for switch in cleared:
            if getattr(control, switch):
                setattr(control, switch, False)
        return self.call_event(event, args, state, control, **kwargs)

    call.__name__, call.__qualname__ = event, f"CallbackHandler.{event}"
    call.__doc__ = f"Call `{event}` on the callbacks."
    return call


class CallbackHandler(TrainerCallback):
    """The Trainer's list of callbacks; every `on_*` event goes through `call_event`.

    Parameters:
        callbacks: callbacks or callback classes, called in this order.
        model, processing_class, optimizer, lr_scheduler: handed to each event by keyword; keep them current.
    """

    on_init_end = _forwarded("on_init_end")
    on_train_begin = _forwarded("on_train_begin", "should_training_stop")
    on_train_end = _forwarded("on_train_end")
    on_epoch_begin = _forwarded("on_epoch_begin", "should_epoch_stop")
    on_epoch_end = _forwarded("on_epoch_end")
    on_step_begin = _forwarded("on_step_begin", "should_log", "should_evaluate", "should_save")
    on_pre_optimizer_step = _forwarded("on_pre_optimizer_step")
    on_optimizer_step = _forwarded("on_optimizer_step")
    on_substep_end = _forwarded("on_substep_end")
    on_step_end = _forwarded("on_step_end")
    on_save = _forwarded("on_save", "should_save")
    on_prediction_step = _forwarded("on_prediction_step")
    on_push_begin = _forwarded("on_push_begin")

    def __init__(self, callbacks: list[Any], model: Any, processing_class: Any, optimizer: Any, lr_scheduler: Any):
        self.callbacks: list[Any] = []
        for callback in callbacks:
            self.add_callback(callback)
        self.model = model
        self.processing_class = processing_class
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.train_dataloader: Any = None
        self.eval_dataloader: Any = None
        if not any(isinstance(c, DefaultFlowCallback) or is_a(c, "default flow") for c in self.callbacks):
            logger.warning(
                "No DefaultFlowCallback among the callbacks (%s): nothing will be logged, evaluated or saved, and "
                "training will not stop at max_steps. Add one with trainer.add_callback(DefaultFlowCallback).",
                self.callback_list.replace("\n", ", "),
            )

    def add_callback(self, callback: Any) -> None:
        """Append a callback, or an instance of a callback class.

        Raises:
            TypeError: it is no callback of a Trainer, or its class takes arguments.
        """
        added = new_callback(callback)
        if any(type(present) is type(added) for present in self.callbacks):
            logger.warning("A second %s is added to the callbacks; both will be called.", type(added).__name__)
        self.callbacks.append(added)

    def pop_callback(self, callback: Any) -> Any:
        """Remove and return the first callback of a class, or this very one; None where there is no such callback."""
        found = self._find(callback)
        if found is not None:
            self.callbacks.remove(found)
        return found

    def remove_callback(self, callback: Any) -> None:
        """Remove the first callback of a class (if there is one), or this very one.

        Raises:
            ValueError: an instance that is not in the list.
        """
        if isinstance(callback, type):
            self.pop_callback(callback)
        else:
            self.callbacks.remove(callback)

    def _find(self, callback: Any) -> Any:
        if isinstance(callback, type):
            return next((present for present in self.callbacks if isinstance(present, callback)), None)
        return next((present for present in self.callbacks if present == callback), None)

    @property
    def callback_list(self) -> str:
        """The class names of the callbacks, one on each line."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def on_evaluate(  # type: ignore[override]
        self, args: Any, state: Any, control: TrainerControl, metrics: dict[str, float], **kwargs: Any
    ) -> TrainerControl:
        """Call `on_evaluate` on the callbacks."""
        control.should_evaluate = False
        return self.call_event("on_evaluate", args, state, control, metrics=metrics, **kwargs)

    def on_predict(
        self, args: Any, state: Any, control: TrainerControl, metrics: dict[str, float], **kwargs: Any
    ) -> TrainerControl:
        """Call `on_predict` on the callbacks."""
        return self.call_event("on_predict", args, state, control, metrics=metrics, **kwargs)

    def on_log(  # type: ignore[override]
        self, args: Any, state: Any, control: TrainerControl, logs: dict[str, float], **kwargs: Any
    ) -> TrainerControl:
        """Call `on_log` on the callbacks."""
        control.should_log = False
        return self.call_event("on_log", args, state, control, logs=logs, **kwargs)

    def call_event(self, event: str, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """Call one event on each callback that overrides it, and return the control to go on with.

        Raises:
            TypeError: an event returned something else than a control, or set a switch to neither on nor off.
        """
        nothing = getattr(TrainerCallback, event, None)
        # Not over a copy: a callback that another one adds is called for the same event.
        for callback in self.callbacks:
            # What `listens_to` says, for the most frequent answer without the call.
            if nothing is not None and getattr(type(callback), event, None) is nothing and event not in vars(callback):
                continue
            if not listens_to(callback, event):
                continue
            try:
                answer = getattr(callback, event)(
                    args,
                    state,
                    control,
                    **dict(zip(OFFERED, read_offered(self), strict=True)),
                    **kwargs,
                )
                if answer is not None and answer is not control:
                    check_answer(answer, callback, event)
                    control = answer
            except Exception as error:
                _say_where(error, callback, event, state)
                raise
        return control


def _say_where(error: Exception, callback: Any, event: str, state: Any) -> None:
    where = f"{type(callback).__name__}.{event}"
    if isinstance(error, ControlSwitchError) and where not in str(error):
        error.args = (f"{where}: {error}",)
    add_note(error, f"{FROM_CALLBACK} {where}, at optimizer step {getattr(state, 'global_step', '?')}.")
    if isinstance(error, TypeError) and f"{event}() got an unexpected keyword argument" in str(error):
        add_note(error, f"Events are called with further keywords: def {event}(self, args, state, control, **kwargs).")
