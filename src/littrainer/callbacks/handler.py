"""`CallbackHandler`, which calls the callbacks at each event, and checks of callbacks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from littrainer.arguments.choices import IntervalStrategy, SaveStrategy
from littrainer.callbacks.base import TrainerCallback
from littrainer.callbacks.state import TrainerControl, TrainerState, is_exportable
from littrainer.distributed.failures import set_step_of_error
from littrainer.runtime.lazy_isinstance import is_a, loaded_classes
from littrainer.runtime.notes import add_note, kind_of

logger = logging.getLogger(__name__)

# Event that a duck-typed callback must have.
REQUIRED_EVENT = "on_step_end"
# Attribute of an error that follows on_train_end, as when a search prunes a trial.
ENDED_FOR_CALLBACKS = "_has_ended_for_callbacks"
FROM_CALLBACK = "It came from the callback"


class DefaultFlowCallback(TrainerCallback):
    """Callback that sets the control's switches from the logging, evaluation and save strategies."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        step = state.global_step
        is_last = step >= state.max_steps
        if args.logging_strategy == IntervalStrategy.STEPS and step % state.logging_steps == 0:
            control.should_log = True
        if args.logging_first_step and step == 1:
            control.should_log = True
        if (
            args.eval_strategy == IntervalStrategy.STEPS
            and step >= args.eval_delay
            and (is_last or step % state.eval_steps == 0)
        ):
            control.should_evaluate = True
        if args.save_strategy == SaveStrategy.STEPS and (
            is_last or (state.save_steps > 0 and step % state.save_steps == 0)
        ):
            control.should_save = True
        if is_last:
            control.should_training_stop = True
        return control

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        if args.logging_strategy == IntervalStrategy.EPOCH:
            control.should_log = True
        if args.eval_strategy == IntervalStrategy.EPOCH and state.epoch >= args.eval_delay:
            control.should_evaluate = True
        if args.save_strategy == SaveStrategy.EPOCH:
            control.should_save = True
        return control


def _create_event_method(event: str, *cleared: str) -> Callable[..., TrainerControl]:
    """Return the method for an event, which first clears switches of the control."""

    def call(self: CallbackHandler, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        for switch in cleared:
            if getattr(control, switch):
                setattr(control, switch, False)
        return self.call_event(event, args, state, control, **kwargs)

    call.__name__, call.__qualname__ = event, f"CallbackHandler.{event}"
    call.__doc__ = f"Call `{event}` on the callbacks."
    return call


class CallbackHandler(TrainerCallback):
    """List of the Trainer's callbacks, with a method for each event.

    Parameters:
        callbacks: callbacks or callback classes, called in this order.
        model, processing_class, optimizer, lr_scheduler: keywords of each event; keep them current.
    """

    on_init_end = _create_event_method("on_init_end")
    on_train_begin = _create_event_method("on_train_begin", "should_training_stop")
    on_train_end = _create_event_method("on_train_end")
    on_epoch_begin = _create_event_method("on_epoch_begin", "should_epoch_stop")
    on_epoch_end = _create_event_method("on_epoch_end")
    on_step_begin = _create_event_method("on_step_begin", "should_log", "should_evaluate", "should_save")
    on_pre_optimizer_step = _create_event_method("on_pre_optimizer_step")
    on_optimizer_step = _create_event_method("on_optimizer_step")
    on_substep_end = _create_event_method("on_substep_end")
    on_step_end = _create_event_method("on_step_end")
    on_save = _create_event_method("on_save", "should_save")
    on_prediction_step = _create_event_method("on_prediction_step")
    on_push_begin = _create_event_method("on_push_begin")

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
        if not any(
            isinstance(callback, DefaultFlowCallback) or is_a(callback, "default flow") for callback in self.callbacks
        ):
            logger.warning(
                "No DefaultFlowCallback among the callbacks (%s): nothing will be logged, evaluated or saved, and "
                "training will not stop at max_steps. Add one with trainer.add_callback(DefaultFlowCallback).",
                self.callback_list.replace("\n", ", "),
            )

    def add_callback(self, callback: Any) -> None:
        added = create_callback(callback)
        if any(type(present) is type(added) for present in self.callbacks):
            logger.warning("A second %s is added to the callbacks; both will be called.", type(added).__name__)
        self.callbacks.append(added)

    def pop_callback(self, callback: Any) -> Any:
        return pop_matching(self.callbacks, callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove this callback (raise a ValueError if absent), or the first callback of this class."""
        if isinstance(callback, type):
            self.pop_callback(callback)
        else:
            self.callbacks.remove(callback)

    @property
    def callback_list(self) -> str:
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def on_evaluate(  # type: ignore[override]
        self, args: Any, state: Any, control: TrainerControl, metrics: dict[str, float], **kwargs: Any
    ) -> TrainerControl:
        control.should_evaluate = False
        return self.call_event("on_evaluate", args, state, control, metrics=metrics, **kwargs)

    def on_predict(
        self, args: Any, state: Any, control: TrainerControl, metrics: dict[str, float], **kwargs: Any
    ) -> TrainerControl:
        return self.call_event("on_predict", args, state, control, metrics=metrics, **kwargs)

    def on_log(  # type: ignore[override]
        self, args: Any, state: Any, control: TrainerControl, logs: dict[str, float], **kwargs: Any
    ) -> TrainerControl:
        control.should_log = False
        return self.call_event("on_log", args, state, control, logs=logs, **kwargs)

    def call_event(self, event: str, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """Call an event on each callback that overrides it."""
        empty_event = getattr(TrainerCallback, event, event)
        # The list is not copied, so that a callback added by another callback is called for the same event.
        for callback in self.callbacks:
            # Duck-typed callbacks may lack events.
            method = getattr(callback, event, None)
            if getattr(method, "__func__", method) is empty_event or not callable(method):
                continue
            try:
                returned = method(
                    args,
                    state,
                    control,
                    model=self.model,
                    processing_class=self.processing_class,
                    optimizer=self.optimizer,
                    lr_scheduler=self.lr_scheduler,
                    train_dataloader=self.train_dataloader,
                    eval_dataloader=self.eval_dataloader,
                    **kwargs,
                )
                control = control if returned is None else returned
            except Exception as error:
                _note_callback(error, callback, event, state)
                raise
        return control


def _note_callback(error: Exception, callback: Any, event: str, state: Any) -> None:
    where = f"{type(callback).__name__}.{event}"
    add_note(error, f"{FROM_CALLBACK} {where}, at optimizer step {getattr(state, 'global_step', '?')}.")
    if isinstance(error, TypeError) and f"{event}() got an unexpected keyword argument" in str(error):
        add_note(error, f"Events are called with further keywords: def {event}(self, args, state, control, **kwargs).")


def normalize_callbacks(callbacks: Any) -> list[Any]:
    """Return `callbacks` as a list; raise a TypeError for a single callback."""
    if callbacks is None:
        return []
    if isinstance(callbacks, (str, bytes, type)) or not isinstance(callbacks, Iterable):
        kind = f"the class {callbacks.__name__}" if isinstance(callbacks, type) else kind_of(callbacks)
        raise TypeError(f"callbacks takes a list of callbacks, and was given {kind}: write callbacks=[...].")
    return list(callbacks)


def create_callback(callback: Any) -> Any:
    """Return a callback that the user passed as an instance or a class.

    Raises:
        TypeError: the object is no callback of a Trainer, or its class takes arguments.
    """
    is_class = isinstance(callback, type)
    kind: type = callback if is_class else type(callback)
    if issubclass(kind, loaded_classes("lightning callback")):
        raise TypeError(
            f"{kind.__name__} is a Lightning callback, which the Trainer's callback handler does not call: add it with "
            "trainer.add_callback(...), or give it in callbacks=[...]."
        )
    if not issubclass(kind, TrainerCallback) and not callable(getattr(callback, REQUIRED_EVENT, None)):
        what = f"the class {kind.__name__}" if is_class else f"{callback!r} ({kind_of(callback)})"
        raise TypeError(
            f"A callback was given that is neither a TrainerCallback nor a Lightning callback: {what}. Derive its "
            "class from TrainerCallback, and override the events of interest."
        )
    return instantiate_callback(callback)


def instantiate_callback(callback: Any) -> Any:
    if not isinstance(callback, type):
        return callback
    try:
        return callback()
    except TypeError as error:
        add_note(error, f"The class {callback.__name__} is called without arguments; give an instance instead.")
        raise


def pop_matching(callbacks: list[Any], callback: Any) -> Any:
    """Remove and return this callback, or the first callback of this class; None if absent."""
    for present in callbacks:
        if isinstance(present, callback) if isinstance(callback, type) else present == callback:
            callbacks.remove(present)
            return present
    return None


@contextmanager
def notify_of_failure(handler: CallbackHandler, args: Any, state: Callable[[], TrainerState]) -> Iterator[None]:
    """Call `on_training_failed` on callbacks that have it, after an error or an interruption.

    The method has to close what the callback's `on_train_begin` opened; its errors are logged.
    """
    try:
        yield
    except BaseException as error:
        set_step_of_error(error, state().global_step)
        callbacks = [] if getattr(error, ENDED_FOR_CALLBACKS, False) else list(handler.callbacks)
        for callback in callbacks:
            try:
                if callable(getattr(callback, "on_training_failed", None)):
                    callback.on_training_failed(args, state(), error)
            except Exception:
                logger.warning("%s.on_training_failed failed:", type(callback).__name__, exc_info=True)
        raise


def restore_callbacks(handler: CallbackHandler, saved_states: dict[str, Any], control: Any) -> Any:
    """Replace callbacks by callbacks created from saved states, at the end of the list; return the control.

    Parameters:
        saved_states: `TrainerState.stateful_callbacks`.
    """
    restored: list[Any] = []
    replaced: set[int] = set()
    without_callback = []
    for class_name, saved in saved_states.items():
        states = saved if isinstance(saved, list) else [saved]
        if class_name == type(control).__name__:
            control = TrainerControl.from_state(states[0])
            continue
        present = [callback for callback in handler.callbacks if type(callback).__name__ == class_name]
        if not present:
            without_callback.append(class_name)
        if len(present) > 1 and len(states) % len(present) == 0:
            # Each save appends the states of all callbacks of a class.
            states = states[-len(present) :]
        for callback, state in zip(present, states, strict=False):
            if is_exportable(callback):
                replaced.add(id(callback))
                restored.append(type(callback).from_state({"args": {}, "attributes": {}, **state}))
    handler.callbacks[:] = [*(callback for callback in handler.callbacks if id(callback) not in replaced), *restored]
    if without_callback:
        logger.warning(
            "The checkpoint has states of callbacks that this Trainer does not have: %s.", ", ".join(without_callback)
        )
    return control
