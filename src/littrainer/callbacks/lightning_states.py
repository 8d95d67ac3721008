"""States of Lightning's callbacks in the checkpoints of a Trainer."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from littrainer.data.resume.progress import can_be_stored
from littrainer.runtime.nested_values import map_nested

if TYPE_CHECKING:
    import lightning.pytorch as pl

logger = logging.getLogger(__name__)

# Entry that a callback may read or replace in `on_save_checkpoint`.
WEIGHTS = "state_dict"
# Placeholder for weights that other files have.
MODEL_WEIGHTS = "the weights of the model"
# Set if the model's weights are averaged, and a callback has the trained weights.
IS_EXCHANGED = "averaged_weights_are_the_models"


def collect_lightning_states(module: pl.LightningModule | None) -> dict[str, Any]:
    """Return the states of Lightning callbacks by `state_key`; skip unsafe states with a warning."""
    states = {callback.state_key: (callback, callback.state_dict()) for callback in _get_callbacks(module)}
    return _keep_storable(states, "state_dict()")


def collect_lightning_additions(module: pl.LightningModule | None, global_step: int) -> dict[str, Any]:
    """Return the entries that each callback's `on_save_checkpoint` adds or replaces, by its `state_key`."""
    additions = {}
    for callback in _get_callbacks(module):
        if module is None or not _overrides(callback, "on_save_checkpoint"):
            continue
        original = _create_lightning_checkpoint(module, global_step)
        checkpoint = dict(original)
        callback.on_save_checkpoint(module.trainer, module, checkpoint)
        added = {
            name: MODEL_WEIGHTS if value is original[WEIGHTS] else value
            for name, value in checkpoint.items()
            if value is not original.get(name)
        }
        additions[callback.state_key] = callback, added
    return _keep_storable(additions, "on_save_checkpoint")


def _keep_storable(values: dict[str, tuple[Any, Any]], method: str) -> dict[str, Any]:
    """Return copies of values that can be loaded safely; warn of the others."""
    stored = {}
    for key, (callback, value) in values.items():
        if value and can_be_stored(_strip_tensors(value)):
            stored[key] = copy.deepcopy(value)
        elif value:
            logger.warning(
                "What %s.%s gives is not kept in checkpoints: it holds something that could not be loaded safely. Keep "
                "tensors, numbers, text and containers of them there.",
                type(callback).__name__,
                method,
            )
    return stored


def _strip_tensors(value: Any) -> Any:
    """Return a nested value with empty tensors, which are safe and may be large."""
    return map_nested(
        lambda leaf: torch.empty(0) if isinstance(leaf, torch.Tensor) else leaf,
        value,
        is_leaf=lambda part: type(part) not in (dict, OrderedDict, list, tuple),
    )


def restore_lightning_callbacks(
    module: pl.LightningModule | None, global_step: int, record: dict[str, Any] | None
) -> None:
    """Restore the states of Lightning callbacks from a checkpoint.

    Parameters:
        record: content of `littrainer_resume.pt`, if any.
    """
    states = (record or {}).get("lightning_callbacks", {})
    additions = (record or {}).get("lightning_additions", {})
    callbacks = _get_callbacks(module)
    for callback in callbacks:
        key = callback.state_key
        if key in states:
            try:
                callback.load_state_dict(states[key])
            except Exception as error:
                logger.warning(
                    "%s cannot load its state from the checkpoint (%s: %s) and begins without state.",
                    type(callback).__name__,
                    type(error).__name__,
                    error,
                )
        loads_checkpoint = key in additions or (record is not None and _overrides(callback, "on_load_checkpoint"))
        if module is not None and loads_checkpoint:
            checkpoint = _create_lightning_checkpoint(module, global_step)
            weights = checkpoint[WEIGHTS]
            for name, value in additions.get(key, {}).items():
                checkpoint[name] = weights if isinstance(value, str) and value == MODEL_WEIGHTS else value
            callback.on_load_checkpoint(module.trainer, module, checkpoint)
    for key in additions.keys() - {callback.state_key for callback in callbacks}:
        if module is not None and additions[key].get(IS_EXCHANGED):
            module.load_state_dict(additions[key][WEIGHTS])


def _create_lightning_checkpoint(module: pl.LightningModule, global_step: int) -> dict[str, Any]:
    from lightning.pytorch import __version__

    return {
        "epoch": module.trainer.current_epoch,
        "global_step": global_step,
        "pytorch-lightning_version": __version__,
        WEIGHTS: module.state_dict(),
    }


def _get_callbacks(module: pl.LightningModule | None) -> list[Any]:
    return [] if module is None else list(module.trainer.callbacks)  # type: ignore[attr-defined]


def _overrides(callback: Any, hook: str) -> bool:
    from lightning.pytorch import Callback

    method = getattr(callback, hook)
    return getattr(method, "__func__", method) is not getattr(Callback, hook)
