"""Writing a model, and a whole checkpoint, in the directory format of transformers."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.callbacks.state import TrainerState, exported_states, is_exportable
from littrainer.checkpoint.arguments_file import write_arguments
from littrainer.checkpoint.layout import (
    OPTIMIZER_NAME,
    PREFIX_CHECKPOINT_DIR,
    SCALER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    TRAINING_ARGS_NAME,
)
from littrainer.checkpoint.names import RESUME_RECORD_NAME
from littrainer.checkpoint.random_state import capture_random_states, random_state_name
from littrainer.checkpoint.sealing import Seal, note_changes
from littrainer.checkpoint.staging import staged_checkpoint
from littrainer.checkpoint.summing import save_and_sum
from littrainer.checkpoint.weights import write_weights

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)


def write_model(trainer: Trainer, output_dir: str, state_dict: dict[str, Any] | None = None) -> None:
    """Write weights, configuration, processing class and training arguments, loadable with `from_pretrained`.

    Parameters:
        output_dir: the folder, created where it does not exist.
        state_dict: weights to write; the model's own by default.
    """
    write_weights(trainer.model, output_dir, state_dict, _max_shard_size(trainer))
    write_companions(trainer, output_dir)


def write_companions(trainer: Trainer, output_dir: str) -> None:
    """Write what lies beside the weights of a model: the processing class and the training arguments."""
    processing_class = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    if processing_class is not None:
        processing_class.save_pretrained(output_dir)
    write_arguments(trainer.args, os.path.join(output_dir, TRAINING_ARGS_NAME))


def _max_shard_size(trainer: Trainer) -> int | str | None:
    in_arguments: Any = trainer.args.lightning
    plugins = {**(in_arguments or {}), **trainer.lightning_keywords}.get("plugins") or []
    sizes = (
        getattr(plugin, "max_shard_size", None) for plugin in (plugins if isinstance(plugins, list) else [plugins])
    )
    return next((size for size in sizes if size is not None), None)


@dataclass
class CheckpointStates:
    """What a checkpoint holds beside the model, collected at one optimizer step.

    Parameters:
        files: objects for torch.save by file name; they refer to tensors that training goes on to change.
        trainer_state: the text of trainer_state.json.
    """

    files: dict[str, Any]
    trainer_state: str


def write_checkpoint(trainer: Trainer, run_dir: str) -> str:
    """Write all that resuming needs to `checkpoint-<step>` and return that folder.

    Parameters:
        run_dir: the folder that holds this training's checkpoints.

    Raises:
        OSError: a file could not be written; earlier checkpoints are as they were.
    """
    final = Path(run_dir) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    with staged_checkpoint(final) as staged:
        fill_checkpoint(trainer, staged.folder, run_dir, staged.seal)
    trainer._sealed_checkpoint = (final, staged.stamps)
    return str(final)


def fill_checkpoint(trainer: Trainer, folder: Path, run_dir: str | Path, seal: Seal | None = None) -> None:
    """Write a checkpoint's files into a folder.

    Parameters:
        run_dir: the folder that holds this training's checkpoints.
        seal: is told of each file as soon as it is complete.
    """
    trainer.save_model(str(folder), _internal_call=True)
    if seal is not None:
        seal.add_all()
    _note_best_checkpoint(trainer.state, run_dir)
    if not trainer.args.save_only_model:
        trainer._open_seal = seal
        try:
            # A subclass may have its own of each.
            trainer._save_optimizer_and_scheduler(str(folder))
            trainer._save_scaler(str(folder))
            trainer._save_rng_state(str(folder))
        finally:
            trainer._open_seal = None
        write_files(_resume_record(trainer), folder, seal)
    _note_exported_states(trainer)
    (folder / TRAINER_STATE_NAME).write_text(trainer.state.to_json(), "utf-8")


def optimizer_and_schedule(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint holds of optimizer and schedule, by file name."""
    return {OPTIMIZER_NAME: trainer.optimizer.state_dict(), SCHEDULER_NAME: trainer.lr_scheduler.state_dict()}


def loss_scaling(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint holds of the loss scaling of fp16, by file name; nothing in any other precision."""
    scaler = trainer.accelerator.scaler
    return {} if scaler is None else {SCALER_NAME: scaler.state_dict()}


def random_states(trainer: Trainer) -> dict[str, Any]:
    """Where the random generators stand, by file name."""
    return {random_state_name(trainer.args): capture_random_states()}


def _resume_record(trainer: Trainer) -> dict[str, Any]:
    return {} if trainer.training_run is None else {RESUME_RECORD_NAME: trainer.training_run.resume_record()}


def _note_exported_states(trainer: Trainer) -> None:
    callbacks = [*trainer.callback_handler.callbacks, trainer.control]
    trainer.state.stateful_callbacks.update(exported_states(list(filter(is_exportable, callbacks))))


def collect_states(trainer: Trainer, run_dir: str | Path) -> CheckpointStates:
    """Collect what a checkpoint of this optimizer step holds beside the model.

    Parameters:
        run_dir: the folder that holds this training's checkpoints.
    """
    state = trainer.state
    _note_best_checkpoint(state, run_dir)
    files: dict[str, Any] = {}
    if not trainer.args.save_only_model:
        for part in (optimizer_and_schedule, loss_scaling, random_states, _resume_record):
            files.update(part(trainer))
    _note_exported_states(trainer)
    return CheckpointStates(files, state.to_json())


def write_states(states: CheckpointStates, folder: Path, seal: Seal | None = None) -> None:
    """Write collected states into a checkpoint's folder.

    Parameters:
        seal: is told of each file as soon as it is complete.
    """
    write_files(states.files, folder, seal)
    (folder / TRAINER_STATE_NAME).write_text(states.trainer_state, "utf-8")


def write_files(files: dict[str, Any], folder: Path, seal: Seal | None = None) -> None:
    """Write objects with torch.save.

    Parameters:
        files: the objects by file name.
        seal: is told of each file as soon as it is complete.
    """
    for name, value in files.items():
        record = save_and_sum(value, folder / name, without_inner_sums=seal is not None and name == OPTIMIZER_NAME)
        if seal is not None:
            seal.add(folder / name, record)


def _note_best_checkpoint(state: TrainerState, run_dir: str | Path) -> None:
    if not state.best_global_step:
        return
    best = Path(run_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
    # The one that is being written takes its place when it is complete.
    if state.best_global_step == state.global_step or best.is_dir():
        state.best_model_checkpoint = str(best)


def note_changes_of_callbacks(trainer: Trainer) -> None:
    """Let the checkpoint written last count as intact with what overrides and `on_save` callbacks did to its files."""
    if trainer._sealed_checkpoint is None:
        return
    folder, stamps = trainer._sealed_checkpoint
    trainer._sealed_checkpoint = None
    if folder.is_dir():
        note_changes(folder, stamps)
