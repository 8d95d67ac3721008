"""A Trainer is after a search, and at the start of each trial, what it was when the search began."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from littrainer.callbacks.lightning_callbacks import PACKAGES
from littrainer.callbacks.state import is_exportable
from littrainer.model.traversal import model_device, stays_in_place
from littrainer.search.memory import OF_THE_HANDLER, release_memory
from littrainer.search.trial_parameters import differs
from littrainer.strategies.shards import is_sharded

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

# What a Trainer makes of its arguments and its model, or keeps of a training.
KEPT_ATTRIBUTES = (
    "args",
    "model",
    "model_wrapped",
    "optimizer",
    "lr_scheduler",
    "_created_lr_scheduler",
    "schedule_is_replaced",
    "deepspeed",
    "state",
    "training_run",
    "lightning_trainer",
    "accelerator",
    "gather_function",
    "is_deepspeed_enabled",
    "is_fsdp_enabled",
    "place_model_on_device",
    "label_names",
    "label_smoother",
    "neftune_noise_alpha",
    "model_accepts_loss_kwargs",
    "can_return_loss",
    "_loss_shifts_labels",
    "_signature_columns",
    "_described_model_class",
    "_train_batch_size",
    "_memory",
    "_model_is_prepared",
    "session",
)


class Found:
    """What a Trainer was when a search began."""

    def __init__(self, trainer: Trainer):
        self._arguments = {name: (value, _content(value)) for name, value in vars(trainer.args).items()}
        self._attributes = {name: vars(trainer)[name] for name in KEPT_ATTRIBUTES if name in vars(trainer)}
        self._state = copy.deepcopy(trainer.state)
        self._control = trainer.control, dict(vars(trainer.control))
        handler = trainer.callback_handler
        self._offered = {name: getattr(handler, name) for name in OF_THE_HANDLER}
        self._callbacks = list(handler.callbacks)
        self._lightning_callbacks = list(trainer.lightning_callbacks)
        self._callbacks_of_trials: tuple[list[Any], list[Any]] | None = None
        self._states = [(each, copy.deepcopy(each.state())) for each in self._callbacks if is_exportable(each)]
        self._lightning_states = [(each, _state_of(each)) for each in self._lightning_callbacks]
        self.model = trainer.model
        stays = self.model is None or is_sharded(self.model) or stays_in_place(self.model)
        self.device = None if stays else model_device(self.model)

    def make_room(self) -> None:
        """Keep the model in the host's memory until the search is over."""
        if self.device is not None and self.device.type != "cpu":
            self.model.to("cpu")

    def begin_trial(self, trainer: Trainer) -> list[str]:
        """Let a trial find what the search found: arguments and what follows from them, callbacks and their states.

        Returns:
            the callbacks that were in another state.
        """
        changed = [f"{type(each).__name__}'s state" for each, state in self._states if differs(each.state(), state)]
        self._put_back_arguments(trainer)
        vars(trainer).update(self._attributes)
        trainer.state = copy.deepcopy(self._state)
        if self._callbacks_of_trials is None:
            # With those that the backend has added for the search.
            self._callbacks_of_trials = list(trainer.callback_handler.callbacks), list(trainer.lightning_callbacks)
        _put_back_callbacks(trainer, *self._callbacks_of_trials)
        self._put_back_states(trainer)
        trainer._eval_dataloaders = {}
        return changed

    def put_back(self, trainer: Trainer) -> None:
        """Leave the Trainer as the search found it."""
        release_memory(trainer)
        self._put_back_arguments(trainer)
        trainer._arguments_after_search = dict(vars(trainer.args))
        vars(trainer).update(self._attributes)
        _update_fields(trainer.state, self._state)
        _put_back_callbacks(trainer, self._callbacks, self._lightning_callbacks)
        self._put_back_states(trainer)
        for name, value in self._offered.items():
            setattr(trainer.callback_handler, name, value)
        if self.device is not None and self.device.type != "cpu":
            self.model.to(self.device)

    def _put_back_arguments(self, trainer: Trainer) -> None:
        # A callback may have put others in their place.
        trainer.args = self._attributes["args"]
        values = vars(trainer.args)
        for name in values.keys() - self._arguments.keys():
            del values[name]
        for name, (value, content) in self._arguments.items():
            if content is not None:
                _refill(value, content)
            values[name] = value
        plugin: Any = getattr(trainer.args, "deepspeed_plugin", None)
        if plugin is not None:
            # Of a trial's own one transformers may have been told last.
            plugin.select()

    def _put_back_states(self, trainer: Trainer) -> None:
        trainer.control, switches = self._control
        vars(trainer.control).update(switches)
        for callback, state in self._states:
            values = copy.deepcopy(state)
            known = {name: value for name, value in values.get("args", {}).items() if name in vars(callback)}
            vars(callback).update({**known, **values.get("attributes", {})})
        for callback, state in self._lightning_states:
            _give_state(callback, state)


@contextlib.contextmanager
def left_as_found(trainer: Trainer) -> Iterator[Found]:
    """While the block runs trials change the Trainer; afterwards it is as it was, however the block ends."""
    found = Found(trainer)
    found.make_room()
    try:
        yield found
    finally:
        found.put_back(trainer)


def _put_back_callbacks(trainer: Trainer, callbacks: list[Any], lightning_callbacks: list[Any]) -> None:
    trainer.callback_handler.callbacks[:] = callbacks
    trainer.lightning_callbacks[:] = lightning_callbacks


def _content(value: Any) -> Any:
    return copy.copy(value) if type(value) in (dict, list) else None


def _copied(value: Any) -> Any:
    return copy.copy(value) if type(value) in (dict, list) else value


def _refill(value: Any, content: Any) -> None:
    if value == content:
        return
    value.clear()
    if isinstance(value, dict):
        value.update(content)
    else:
        value.extend(content)


def _update_fields(state: Any, as_it_was: Any) -> None:
    for field in dataclasses.fields(as_it_was):
        setattr(state, field.name, getattr(as_it_was, field.name))


def _is_lightnings_own(callback: Any) -> bool:
    return type(callback).__module__.partition(".")[0] in PACKAGES


def _state_of(callback: Any) -> dict[str, Any]:
    """What is given back to a Lightning callback; a script's own may gather results of several trials beside it."""
    if _is_lightnings_own(callback):
        return {name: _copied(value) for name, value in vars(callback).items()}
    return copy.deepcopy(callback.state_dict())


def _give_state(callback: Any, state: dict[str, Any]) -> None:
    if _is_lightnings_own(callback):
        values = vars(callback)
        values.clear()
        values.update({name: _copied(value) for name, value in state.items()})
    elif state:
        callback.load_state_dict(copy.deepcopy(state))
