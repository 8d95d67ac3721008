"""Writing a model, and a whole checkpoint, in the directory format of transformers."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.callbacks.state import exported_states, is_exportable
from littrainer.checkpoint.arguments_file import write_arguments
from littrainer.checkpoint.atomic_write import name_final_folder
from littrainer.checkpoint.checksums import Seal, note_changes, save_and_sum
from littrainer.checkpoint.distributed_save import place_of, staged_together
from littrainer.checkpoint.layout import (
    OPTIMIZER_NAME,
    PREFIX_CHECKPOINT_DIR,
    RESUME_RECORD_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    TRAINING_ARGS_NAME,
    resume_record_name,
)
from littrainer.checkpoint.random_state import capture_random_states, random_state_name
from littrainer.checkpoint.weights import write_weights
from littrainer.distributed.agreement import are_several, from_each

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)
logger.addFilter(name_final_folder)


def write_model(trainer: Trainer, output_dir: str, state_dict: dict[str, Any] | None = None) -> None:
    """Write weights, configuration, processing class and training arguments, loadable with `from_pretrained`.

    Parameters:
        output_dir: the folder, created where it does not exist.
        state_dict: weights to write; the model's own by default.
    """
    logger.info(f"Saving model checkpoint to {output_dir}")
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
        trainer_state: the text of trainer_state.json, where this process writes it.
    """

    files: dict[str, Any]
    trainer_state: str | None


def write_checkpoint(trainer: Trainer, run_dir: str) -> str:
    """Write all that resuming needs to `checkpoint-<step>` and return that folder; all processes call this together.

    Parameters:
        run_dir: the folder that holds this training's checkpoints.

    Raises:
        OSError: a file could not be written; earlier checkpoints are as they were.
        FailedElsewhere: another process could not write its part.
    """
    final = Path(run_dir) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    note_best_checkpoint(trainer, run_dir)
    with staged_together(trainer, final) as staged:
        fill_checkpoint(trainer, staged.folder, staged.seal)
    trainer._sealed_checkpoint = (final, staged.stamps) if staged.stamps else None
    return str(final)


def write_checkpoint_to_go_on(trainer: Trainer, folder: str) -> None:
    """Write `checkpoint-<step>` into a folder of a search library, whatever `save_only_model` says.

    What is best so far is left as it stands among the training's own checkpoints.
    """
    trainer.store_flos()
    with staged_together(trainer, Path(folder) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}") as staged:
        fill_checkpoint(trainer, staged.folder, staged.seal, is_complete=True)


def fill_checkpoint(trainer: Trainer, folder: Path, seal: Seal | None = None, is_complete: bool = False) -> None:
    """Write a checkpoint's files into a folder: this process's part, where there are several.

    Parameters:
        seal: is told of each file as soon as it is complete.
        is_complete: write what resuming needs, whatever `save_only_model` says.
    """
    trainer.save_model(str(folder), _internal_call=True)
    if seal is not None:
        seal.add_all()
    if is_complete or not trainer.args.save_only_model:
        trainer._open_seal = seal
        try:
            # A subclass may have its own of each.
            trainer._save_optimizer_and_scheduler(str(folder))
            trainer._save_scaler(str(folder))
            trainer._save_rng_state(str(folder))
        finally:
            trainer._open_seal = None
        write_files(_resume_record(trainer), folder, seal)
    if trainer.args.should_save:
        _note_exported_states(trainer)
        (folder / TRAINER_STATE_NAME).write_text(trainer.state.to_json(), "utf-8")


def schedule(trainer: Trainer) -> dict[str, Any]:
    """What this process writes of the schedule, by file name."""
    if not trainer.args.should_save or getattr(trainer.lr_scheduler, "is_kept_by_engine", False):
        return {}
    return {SCHEDULER_NAME: trainer.lr_scheduler.state_dict()}


def loss_scaling(trainer: Trainer) -> dict[str, Any]:
    """What this process writes of the loss scaling of fp16, by file name; nothing in any other precision."""
    scaler = trainer.accelerator.scaler
    return {SCALER_NAME: scaler.state_dict()} if scaler is not None and trainer.args.should_save else {}


def random_states(trainer: Trainer) -> dict[str, Any]:
    """Where this process's random generators stand, by file name."""
    return {random_state_name(trainer.args): capture_random_states()}


def _resume_record(trainer: Trainer) -> dict[str, Any]:
    if trainer.training_run is None:
        return {}
    rank = trainer.args.process_index
    record = trainer.training_run.resume_record()
    files = {resume_record_name(rank): {name: record[name] for name in ("version", "data")}} if rank else {}
    return {**files, RESUME_RECORD_NAME: record} if trainer.args.should_save else files


def _note_exported_states(trainer: Trainer) -> None:
    callbacks = [*trainer.callback_handler.callbacks, trainer.control]
    states = trainer.state.stateful_callbacks
    for name, now in exported_states(list(filter(is_exportable, callbacks))).items():
        # Where one class has several callbacks, each save adds their states to the list, as in transformers.
        before = states.get(name)
        states[name] = [*before, *(now if isinstance(now, list) else [now])] if isinstance(before, list) else now


def collect_states(trainer: Trainer, optimizer_state: dict[str, Any] | None) -> CheckpointStates:
    """Collect what this process writes for a checkpoint of this optimizer step beside the model.

    Parameters:
        optimizer_state: the optimizer's, where this process writes it.
    """
    files: dict[str, Any] = {} if optimizer_state is None else {OPTIMIZER_NAME: optimizer_state}
    if not trainer.args.save_only_model:
        for part in (schedule, loss_scaling, random_states, _resume_record):
            files.update(part(trainer))
    if not trainer.args.should_save:
        return CheckpointStates(files, None)
    _note_exported_states(trainer)
    return CheckpointStates(files, trainer.state.to_json())


def write_states(states: CheckpointStates, folder: Path, seal: Seal | None = None) -> None:
    """Write collected states into a checkpoint's folder.

    Parameters:
        seal: is told of each file as soon as it is complete.
    """
    write_files(states.files, folder, seal)
    if states.trainer_state is not None:
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


def note_best_checkpoint(trainer: Trainer, run_dir: str | Path) -> None:
    """Note in the Trainer's state where the best checkpoint lies, which may be the one that is written next.

    Parameters:
        run_dir: the folder that holds this training's checkpoints.
    """
    state = trainer.state
    if not state.best_global_step:
        return
    best = Path(run_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
    # The one that is being written takes its place when it is complete.
    if state.best_global_step == state.global_step or best.is_dir():
        state.best_model_checkpoint = str(best)
    if are_several():
        # Its path may be another one in each process, and only who writes checkpoints sees them for certain.
        leader = place_of(trainer, Path(run_dir)).leader
        state.best_model_checkpoint = from_each(state.best_model_checkpoint)[leader or 0]


def note_changes_of_callbacks(trainer: Trainer) -> None:
    """Let the checkpoint written last count as intact with what overrides and `on_save` callbacks did to its files."""
    if trainer._sealed_checkpoint is None:
        return
    folder, stamps = trainer._sealed_checkpoint
    trainer._sealed_checkpoint = None
    if folder.is_dir():
        note_changes(folder, stamps)
