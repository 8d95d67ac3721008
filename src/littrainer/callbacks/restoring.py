"""Giving callbacks the states that a checkpoint keeps for them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from littrainer.callbacks.state import TrainerControl, is_exportable

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)


def restore_callbacks(trainer: Trainer) -> None:
    """Replace callbacks by ones made from the saved states of their class; these come after all others.

    Several callbacks of a class get the states in the order in which they were saved. States of classes that the
    Trainer has no callback of are named in a warning.
    """
    handler = trainer.callback_handler
    restored: list[Any] = []
    replaced: set[int] = set()
    without_callback = []
    for class_name, saved in trainer.state.stateful_callbacks.items():
        states = saved if isinstance(saved, list) else [saved]
        if class_name == type(trainer.control).__name__:
            trainer.control = TrainerControl.from_state(states[0])
            continue
        present = [callback for callback in handler.callbacks if type(callback).__name__ == class_name]
        if not present:
            without_callback.append(class_name)
        if len(present) > 1 and len(states) % len(present) == 0:
            # Each save adds the states of several callbacks; those of the last one count.
            states = states[-len(present) :]
        for callback, state in zip(present, states, strict=False):
            if is_exportable(callback):
                replaced.add(id(callback))
                restored.append(type(callback).from_state({"args": {}, "attributes": {}, **state}))
    handler.callbacks[:] = [*(one for one in handler.callbacks if id(one) not in replaced), *restored]
    if without_callback:
        logger.warning(
            "The checkpoint has states of callbacks that this Trainer does not have: %s.", ", ".join(without_callback)
        )
