"""Giving back the memory that a trial took."""

from __future__ import annotations

import traceback
from types import FrameType
from typing import TYPE_CHECKING

from littrainer.callbacks.lightning_metrics import ValidationRounds
from littrainer.training.batch_size_search import empty_device_cache

if TYPE_CHECKING:
    from littrainer.trainer import Trainer


# What refers to a model, its gradients or its optimizer after a training.
OF_A_TRAINING = (
    "model",
    "model_wrapped",
    "optimizer",
    "lr_scheduler",
    "deepspeed",
    "lightning_trainer",
    "lightning_module",
    "idle_evaluator",
    "training_run",
    "neftune_hook_handle",
    "background_saves",
    "_sealed_checkpoint",
    "_open_seal",
)
OF_THE_HANDLER = ("model", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")


def release_memory(trainer: Trainer) -> None:
    """Let go of a training's model, optimizer, loaders and Lightning objects, and empty the device's cache.

    The Trainer has no model afterwards, until `train()` makes one.
    """
    for name in OF_A_TRAINING:
        setattr(trainer, name, None)
    for name in OF_THE_HANDLER:
        setattr(trainer.callback_handler, name, None)
    trainer._created_lr_scheduler = False
    trainer.validation_rounds = ValidationRounds()
    trainer._eval_dataloaders = {}
    trainer.session = type(trainer.session)()
    # It also collects what refers to itself in circles, as Lightning's objects do.
    trainer.accelerator.clear()
    empty_device_cache()


def release_frames(error: BaseException) -> None:
    """Let go of the local variables that the traceback of an error, or of what it came from, keeps alive.

    The traceback itself stays: it shows the same lines.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        found = waiting.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        for frame, _ in traceback.walk_tb(found.__traceback__):
            _clear_with_callers(frame)
        waiting += [found.__cause__, found.__context__]


def _clear_with_callers(frame: FrameType | None) -> None:
    # Calls that a short traceback leaves out are there as the callers of those that it shows.
    while frame is not None:
        try:
            frame.clear()
        except RuntimeError:
            # It still runs, and so do its callers.
            return
        frame = frame.f_back
