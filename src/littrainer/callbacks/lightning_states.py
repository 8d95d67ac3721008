"""States of Lightning's callbacks in the checkpoints of a Trainer, and back."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from littrainer.data.position import loads_safely

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)

# What Lightning's checkpoints hold that a callback may look at, or replace, in `on_save_checkpoint`.
WEIGHTS = "state_dict"
# Stands for the weights of the model at the checkpoint, which are in files of their own.
THE_MODELS_WEIGHTS = "the weights of the model"


def states_of_lightning_callbacks(trainer: Trainer) -> dict[str, Any]:
    """What `state_dict()` of each Lightning callback returns, by its `state_key`.

    One that holds what could not be loaded safely is left out, and named in a warning.
    """
    states = {}
    for callback in _callbacks(trainer):
        state = callback.state_dict()
        if not state:
            continue
        if loads_safely(_outline(state)):
            states[callback.state_key] = copy.deepcopy(state)
        else:
            _warn_that_left_out(callback, "state_dict()")
    return states


def additions_of_lightning_callbacks(trainer: Trainer) -> dict[str, Any]:
    """What `on_save_checkpoint` of each Lightning callback adds to a checkpoint, or replaces in it, by its `state_key`.

    One that holds what could not be loaded safely is left out, and named in a warning.
    """
    additions = {}
    for callback in _callbacks(trainer):
        if not _has_own(callback, "on_save_checkpoint"):
            continue
        module = trainer.lightning_module
        offered = _as_lightning_has_it(trainer)
        checkpoint = dict(offered)
        callback.on_save_checkpoint(trainer.lightning_trainer, module, checkpoint)
        added = {
            name: THE_MODELS_WEIGHTS if value is offered[WEIGHTS] else value
            for name, value in checkpoint.items()
            if value is not offered.get(name)
        }
        if not added:
            continue
        if loads_safely(_outline(added)):
            additions[callback.state_key] = copy.deepcopy(added)
        else:
            _warn_that_left_out(callback, "on_save_checkpoint")
    return additions


def restore_lightning_callbacks(trainer: Trainer, record: dict[str, Any] | None) -> None:
    """Give Lightning callbacks what the checkpoint has for them.

    Parameters:
        record: what `littrainer_resume.pt` holds; None where the checkpoint has none.
    """
    states = (record or {}).get("lightning_callbacks", {})
    additions = (record or {}).get("lightning_additions", {})
    for callback in _callbacks(trainer):
        key = callback.state_key
        if key in states:
            try:
                callback.load_state_dict(states[key])
            except Exception as error:
                logger.warning(
                    "%s does not take back its state from the checkpoint (%s: %s); it begins anew.",
                    type(callback).__name__,
                    type(error).__name__,
                    error,
                )
        if key in additions or (record is not None and _has_own(callback, "on_load_checkpoint")):
            _load_additions(trainer, callback, additions.get(key, {}))


def _load_additions(trainer: Trainer, callback: Any, added: dict[str, Any]) -> None:
    checkpoint = _as_lightning_has_it(trainer)
    weights = checkpoint[WEIGHTS]
    for name, value in added.items():
        stands_for_weights = isinstance(value, str) and value == THE_MODELS_WEIGHTS
        checkpoint[name] = weights if stands_for_weights else value
    callback.on_load_checkpoint(trainer.lightning_trainer, trainer.lightning_module, checkpoint)


def _as_lightning_has_it(trainer: Trainer) -> dict[str, Any]:
    from lightning.pytorch import __version__

    module, running = trainer.lightning_module, trainer.lightning_trainer
    assert running is not None
    return {
        "epoch": running.current_epoch,
        "global_step": trainer.state.global_step,
        "pytorch-lightning_version": __version__,
        WEIGHTS: module.state_dict(),
    }


def _callbacks(trainer: Trainer) -> list[Any]:
    if trainer.lightning_module is None or trainer.lightning_trainer is None:
        return []
    return list(trainer.lightning_trainer.callbacks)  # type: ignore[attr-defined]


def _has_own(callback: Any, hook: str) -> bool:
    from lightning.pytorch import Callback

    found = getattr(callback, hook)
    return getattr(found, "__func__", found) is not getattr(Callback, hook)


def _outline(value: Any) -> Any:
    # Whether it loads safely does not depend on the numbers in its tensors, which may be as many as the model's.
    if isinstance(value, torch.Tensor):
        return torch.empty(0)
    if isinstance(value, Mapping):
        return type(value)((key, _outline(item)) for key, item in value.items()) if _is_plain(value) else value  # type: ignore[call-arg]
    if type(value) in (list, tuple, set):
        return type(value)(map(_outline, value))
    return value


def _is_plain(value: Any) -> bool:
    return type(value) is dict or type(value).__name__ == "OrderedDict"


def _warn_that_left_out(callback: Any, where: str) -> None:
    logger.warning(
        "What %s.%s gives is not kept in checkpoints: it holds something that could not be loaded safely. Keep "
        "tensors, numbers, text and containers of them there.",
        type(callback).__name__,
        where,
    )
