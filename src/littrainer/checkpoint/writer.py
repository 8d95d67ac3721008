"""Writing a model, and a whole checkpoint, in the directory format of transformers."""

from __future__ import annotations

import copy
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from littrainer.callbacks.state import ExportableState, exported_states
from littrainer.checkpoint.layout import (
    OPTIMIZER_NAME,
    RANDOM_STATE_NAME,
    SAFE_WEIGHTS_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    TRAINING_ARGS_NAME,
)
from littrainer.checkpoint.random_state import capture_random_states
from littrainer.ecosystem import is_a

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)

SECRET_SUFFIX = "_token"


def write_model(trainer: Trainer, output_dir: str, state_dict: dict[str, Any] | None = None) -> None:
    """Write weights, configuration, processing class and training arguments, loadable with `from_pretrained`.

    Parameters:
        output_dir: the folder, created where it does not exist.
        state_dict: weights to write; the model's own by default.
    """
    os.makedirs(output_dir, exist_ok=True)
    if is_a(trainer.model, "pretrained model"):
        trainer.model.save_pretrained(output_dir, state_dict=state_dict)
    else:
        write_weights(trainer.model.state_dict() if state_dict is None else state_dict, output_dir)
    processing_class = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    if processing_class is not None:
        processing_class.save_pretrained(output_dir)
    torch.save(without_secrets(trainer.args), os.path.join(output_dir, TRAINING_ARGS_NAME))


def write_weights(state_dict: dict[str, Any], output_dir: str) -> None:
    """Write the weights of a plain module to model.safetensors.

    Raises:
        ValueError: two names share memory, which the format does not store.
    """
    import safetensors.torch

    places: dict[tuple[Any, int], list[str]] = {}
    for name, tensor in state_dict.items():
        if tensor.numel():
            places.setdefault((tensor.device, tensor.data_ptr()), []).append(name)
    shared = [" and ".join(names) for names in places.values() if len(names) > 1]
    if shared:
        raise ValueError(
            f"The model's weights cannot be written to {output_dir}: {'; '.join(shared)} share memory, which "
            "model.safetensors does not store. Override _save in a subclass of Trainer to write them your own way."
        )
    contiguous = {name: tensor.contiguous() for name, tensor in state_dict.items()}
    safetensors.torch.save_file(contiguous, os.path.join(output_dir, SAFE_WEIGHTS_NAME), metadata={"format": "pt"})


def without_secrets(args: TrainingArguments) -> TrainingArguments:
    """A copy of the arguments whose tokens are blanked, for a file that may be shared."""
    shared = copy.copy(args)
    for name in vars(args):
        if name.endswith(SECRET_SUFFIX):
            setattr(shared, name, None)
    return shared


def write_checkpoint(trainer: Trainer, run_dir: str) -> str:
    """Write all that resuming needs to `checkpoint-<step>` and return that folder.

    Parameters:
        run_dir: the folder that holds this training's checkpoints.
    """
    folder = Path(run_dir) / f"checkpoint-{trainer.state.global_step}"
    is_new = not folder.exists()
    try:
        _fill_checkpoint(trainer, folder)
    except BaseException:
        # A torn checkpoint would be the newest one, and the one to resume from.
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return str(folder)


def _fill_checkpoint(trainer: Trainer, folder: Path) -> None:
    args, state = trainer.args, trainer.state
    trainer.save_model(str(folder), _internal_call=True)
    if state.best_global_step:
        best = folder.parent / f"checkpoint-{state.best_global_step}"
        if best.is_dir():
            state.best_model_checkpoint = str(best)
    if not args.save_only_model:
        torch.save(trainer.optimizer.state_dict(), folder / OPTIMIZER_NAME)
        torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)
        if trainer.accelerator.scaler is not None:
            torch.save(trainer.accelerator.scaler.state_dict(), folder / SCALER_NAME)
        torch.save(capture_random_states(), folder / RANDOM_STATE_NAME)
    callbacks = [*trainer.callback_handler.callbacks, trainer.control]
    state.stateful_callbacks.update(exported_states([c for c in callbacks if isinstance(c, ExportableState)]))
    state.save_to_json(str(folder / TRAINER_STATE_NAME))
