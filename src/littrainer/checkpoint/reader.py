"""Reading checkpoints: weights into a model, optimizer, schedule and random states into a training."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from littrainer.callbacks.state import TrainerState
from littrainer.checkpoint.layout import (
    OPTIMIZER_NAME,
    RANDOM_STATE_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    WEIGHTS_NAME,
    get_last_checkpoint,
)
from littrainer.checkpoint.random_state import restore_random_states

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)

NEEDED_TO_RESUME = (TRAINER_STATE_NAME, OPTIMIZER_NAME, SCHEDULER_NAME, RANDOM_STATE_NAME)


def checkpoint_to_resume(resume_from_checkpoint: str | bool | None, output_dir: str) -> Path | None:
    """The folder that `train(resume_from_checkpoint=...)` means; None for a fresh start.

    Parameters:
        resume_from_checkpoint: a folder, or True for the newest one in `output_dir`.

    Raises:
        ValueError: there is no checkpoint, or it lacks what an exact resume needs.
    """
    if not resume_from_checkpoint:
        return None
    if resume_from_checkpoint is True:
        newest = get_last_checkpoint(output_dir) if Path(output_dir).is_dir() else None
        if newest is None:
            raise ValueError(
                f"resume_from_checkpoint=True, but there is no checkpoint-<step> folder in {output_dir}. Start without "
                "resuming, or give the checkpoint's folder."
            )
        resume_from_checkpoint = newest
    folder = Path(resume_from_checkpoint)
    if not folder.is_dir():
        raise ValueError(f"There is no checkpoint folder {folder} to resume from.")
    missing = [name for name in NEEDED_TO_RESUME if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"The checkpoint {folder} cannot be resumed exactly: {', '.join(missing)} is missing. Resume from another "
            "checkpoint, or load its model with from_pretrained and start a new training."
        )
    return folder


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The state dict in a folder: one safetensors file, its shards, or a file of torch.save.

    Raises:
        ValueError: the folder holds no weights.
    """
    from safetensors.torch import load_file

    if (folder / SAFE_WEIGHTS_NAME).is_file():
        return load_file(folder / SAFE_WEIGHTS_NAME)
    if (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        shards = json.loads((folder / SAFE_WEIGHTS_INDEX_NAME).read_text("utf-8"))["weight_map"].values()
        return {name: tensor for shard in sorted(set(shards)) for name, tensor in load_file(folder / shard).items()}
    if (folder / WEIGHTS_NAME).is_file():
        return torch.load(folder / WEIGHTS_NAME, map_location="cpu", weights_only=True)
    raise ValueError(
        f"No model weights in {folder}: expected {SAFE_WEIGHTS_NAME}, {SAFE_WEIGHTS_INDEX_NAME} or {WEIGHTS_NAME}."
    )


def load_weights(model: Any, folder: Path) -> None:
    """Load the weights in a folder into a model, and say which names did not match.

    Raises:
        ValueError: the folder holds no weights.
    """
    result = model.load_state_dict(read_weights(folder), strict=False)
    # Weights tied to others are stored once, under the other name.
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) | set(
        getattr(model, "_keys_to_ignore_on_save", None) or ()
    )
    missing = [name for name in result.missing_keys if name not in tied]
    if len(missing) < len(result.missing_keys) and hasattr(model, "tie_weights"):
        model.tie_weights()
    if missing:
        logger.warning("%s has no weights for %s.", folder, ", ".join(missing))
    if result.unexpected_keys:
        logger.warning("%s has weights the model does not have: %s.", folder, ", ".join(result.unexpected_keys))


def read_state(folder: Path) -> TrainerState:
    """The trainer state of a checkpoint; a best checkpoint that no longer exists is forgotten."""
    state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
    if state.best_model_checkpoint is not None and not Path(state.best_model_checkpoint).is_dir():
        logger.warning("The best checkpoint so far, %s, is gone; it is not loaded.", state.best_model_checkpoint)
        state.best_model_checkpoint = None
    return state


def load_optimizer_and_scheduler(trainer: Trainer, folder: Path) -> None:
    """Load the states of optimizer and schedule."""
    trainer.optimizer.load_state_dict(torch.load(folder / OPTIMIZER_NAME, map_location="cpu", weights_only=True))
    trainer.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))


def load_scaler(trainer: Trainer, folder: Path) -> None:
    """Load the state of the loss scaling of fp16, where both the checkpoint and this training have one."""
    if trainer.accelerator.scaler is not None and (folder / SCALER_NAME).is_file():
        trainer.accelerator.scaler.load_state_dict(torch.load(folder / SCALER_NAME, weights_only=True))


def load_random_states(folder: Path) -> None:
    """Put the random number generators where the checkpoint left them."""
    restore_random_states(folder / RANDOM_STATE_NAME)
