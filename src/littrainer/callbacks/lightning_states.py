"""States of Lightning's callbacks in the checkpoints of a Trainer, and back."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from littrainer.data.position import loads_safely

if TYPE_CHECKING:
    import lightning.pytorch as pl

logger = logging.getLogger(__name__)

# What Lightning's checkpoints hold that a callback may look at, or replace, in `on_save_checkpoint`.
WEIGHTS = "state_dict"
# Stands for the weights of the model at the checkpoint, which are in other files.
THE_MODELS_WEIGHTS = "the weights of the model"
# The weights of the model are averaged ones; those that were trained are among what the callback adds.
IS_EXCHANGED = "averaged_weights_are_the_models"


def states_of_lightning_callbacks(module: pl.LightningModule | None) -> dict[str, Any]:
    """What `state_dict()` of each Lightning callback returns, by its `state_key`.

    One that holds what could not be loaded safely is left out, and named in a warning.

    Parameters:
        module: that of the training that runs; None if none does.
    """
    states = {}
    for callback in _callbacks(module):
        state = callback.state_dict()
        if not state:
            continue
        if loads_safely(_outline(state)):
            states[callback.state_key] = copy.deepcopy(state)
        else:
            _warn_that_left_out(callback, "state_dict()")
    return states


def additions_of_lightning_callbacks(module: pl.LightningModule | None, global_step: int) -> dict[str, Any]:
    """What `on_save_checkpoint` of each Lightning callback adds to a checkpoint, or replaces in it, by its `state_key`.

    One that holds what could not be loaded safely is left out, and named in a warning.
    """
    additions = {}
    for callback in _callbacks(module):
        if module is None or not _has_own(callback, "on_save_checkpoint"):
            continue
        offered = _lightning_checkpoint(module, global_step)
        checkpoint = dict(offered)
        callback.on_save_checkpoint(module.trainer, module, checkpoint)
        added = {
            name: THE_MODELS_WEIGHTS if value is offered[WEIGHTS] else value
            for name, value in checkpoint.items()
            if value is not offered.get(name)
        }
        if added and loads_safely(_outline(added)):
            additions[callback.state_key] = copy.deepcopy(added)
        elif added:
            _warn_that_left_out(callback, "on_save_checkpoint")
    return additions


def restore_lightning_callbacks(
    module: pl.LightningModule | None, global_step: int, record: dict[str, Any] | None
) -> None:
    """Give Lightning callbacks what the checkpoint has for them.

    Parameters:
        record: what `littrainer_resume.pt` holds; None if the checkpoint has none.
    """
    states = (record or {}).get("lightning_callbacks", {})
    additions = (record or {}).get("lightning_additions", {})
    for callback in _callbacks(module):
        key = callback.state_key
        if key in states:
            try:
                callback.load_state_dict(states[key])
            except Exception as error:
                logger.warning(
                    "%s does not take back its state from the checkpoint (%s: %s); it begins without one.",
                    type(callback).__name__,
                    type(error).__name__,
                    error,
                )
        is_told = key in additions or (record is not None and _has_own(callback, "on_load_checkpoint"))
        if module is not None and is_told:
            checkpoint = _lightning_checkpoint(module, global_step)
            weights = checkpoint[WEIGHTS]
            for name, value in additions.get(key, {}).items():
                stands_for_weights = isinstance(value, str) and value == THE_MODELS_WEIGHTS
                checkpoint[name] = weights if stands_for_weights else value
            callback.on_load_checkpoint(module.trainer, module, checkpoint)
    for key in additions.keys() - {callback.state_key for callback in _callbacks(module)}:
        if module is not None and additions[key].get(IS_EXCHANGED):
            module.load_state_dict(additions[key][WEIGHTS])


def _lightning_checkpoint(module: pl.LightningModule, global_step: int) -> dict[str, Any]:
    from lightning.pytorch import __version__

    return {
        "epoch": module.trainer.current_epoch,
        "global_step": global_step,
        "pytorch-lightning_version": __version__,
        WEIGHTS: module.state_dict(),
    }


def _callbacks(module: pl.LightningModule | None) -> list[Any]:
    return [] if module is None else list(module.trainer.callbacks)  # type: ignore[attr-defined]


def _has_own(callback: Any, hook: str) -> bool:
    from lightning.pytorch import Callback

    found = getattr(callback, hook)
    return getattr(found, "__func__", found) is not getattr(Callback, hook)


def _outline(value: Any) -> Any:
    # Whether it loads safely does not depend on the numbers in its tensors, which may be as many as the model's.
    if isinstance(value, torch.Tensor):
        return torch.empty(0)
    if isinstance(value, Mapping):
        is_plain = type(value) is dict or type(value).__name__ == "OrderedDict"
        return type(value)((key, _outline(item)) for key, item in value.items()) if is_plain else value  # type: ignore[call-arg]
    if type(value) in (list, tuple, set):
        return type(value)(map(_outline, value))
    return value


def _warn_that_left_out(callback: Any, where: str) -> None:
    logger.warning(
        "What %s.%s gives is not kept in checkpoints: it holds something that could not be loaded safely. Keep "
        "tensors, numbers, text and containers of them there.",
        type(callback).__name__,
        where,
    )
