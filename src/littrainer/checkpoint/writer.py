"""Writing a model, and a whole checkpoint, in the directory format of transformers."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from littrainer.callbacks.state import TrainerState, exported_states, is_exportable
from littrainer.checkpoint.atomic_write import StagedCheckpoint, name_final_folder
from littrainer.checkpoint.checksums import BYTES_OF_A_LARGE_FILE
from littrainer.checkpoint.distributed_save import parts_of_checkpoint, place_of
from littrainer.checkpoint.layout import (
    RESUME_RECORD_NAME,
    TRAINER_STATE_NAME,
    TRAINING_ARGS_NAME,
    checkpoint_folder,
    resume_record_name,
)
from littrainer.checkpoint.run_record import write_arguments
from littrainer.checkpoint.safe_loading import refuse_unsafe
from littrainer.checkpoint.weights import names_of_sick, write_weights, writes_given_weights
from littrainer.distributed.agreement import are_several, failing_together, from_each

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


logger = logging.getLogger(__name__)
logger.addFilter(name_final_folder)


@dataclass(slots=True)
class Saving:
    """What is being saved, and what has been saved last.

    Attributes:
        background: writes checkpoints while training goes on; None if the training waits for them.
        written: the checkpoint that this process completed last, until its `on_save` callbacks have run.
        facts: code, data and model that the training began with, if it has written them.
    """

    background: Any = None
    written: Any = None
    facts: dict[str, Any] | None = None


@dataclass
class SavedTraining:
    """What a checkpoint is written of.

    Parameters:
        methods: the Trainer, whose methods write the files; subclasses may override each.
        run_dir: the folder that holds the training's checkpoints.
        callbacks: those whose states are exported, and the control.
        resume_record: gives what exact resuming needs; None if no training runs.
        weights_to_save: within it the model has the weights that are saved.
    """

    methods: Any
    args: TrainingArguments
    state: TrainerState
    run_dir: str
    callbacks: list[Any]
    resume_record: Callable[[], dict[str, Any]] | None
    weights_to_save: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    @property
    def folder(self) -> Path:
        """The checkpoint of the step that the training stands at."""
        return checkpoint_folder(self.run_dir, self.state.global_step)


class CheckpointFiles:
    """The files of one checkpoint, each written when it is collected, or all of them later.

    Parameters:
        staged: where they are written; its seal gets each file as soon as it is complete.
        is_deferred: only collect them, for `write`.
        defers_parts: only collect what each process writes its part of, for `write_parts`.

    Attributes:
        weights: those that `write` has to write.
        objects: what is written with torch.save, by file name; they refer to tensors that training goes on to change.
        parts: what each process writes its part of, by the folder's name; likewise.
    """

    def __init__(self, staged: StagedCheckpoint, is_deferred: bool = False, defers_parts: bool = False) -> None:
        self.folder, self.seal, self.is_deferred = staged.folder, staged.seal, is_deferred
        self.defers_parts = defers_parts
        self.weights: dict[str, Any] | None = None
        self.objects: dict[str, Any] = {}
        self.parts: dict[str, Any] = {}
        self._write_weights: Callable[..., None] | None = None
        self._trainer_state: str | None = None

    def take_weights(self, model: nn.Module, weights: dict[str, Any] | None, write: Callable[..., None]) -> None:
        """Write a model's weights; by default its own.

        Parameters:
            write: called with them; with None for weights that only the model itself can write.
        """
        if self.is_deferred and writes_given_weights(model):
            self.weights, self._write_weights = model.state_dict() if weights is None else weights, write
        else:
            write(weights)

    def take(self, objects: dict[str, Any], trainer_state: str | None = None) -> None:
        """Write objects with torch.save, by file name, and the text of trainer_state.json."""
        self.objects.update(objects)
        self._trainer_state = trainer_state
        if not self.is_deferred:
            self.write()

    def take_parts(self, states: dict[str, Any]) -> None:
        """Write this process's parts of states, by the folder's name; all processes call this."""
        self.parts.update(states)
        for name in states:
            # A process that failed to do so later would leave the others waiting for its part.
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        if not self.defers_parts:
            self.write_parts()

    def write_parts(self, group: Any = None) -> None:
        """Write this process's parts; those of all are there when this returns.

        Parameters:
            group: in which the processes agree; by default that of the training.
        """
        from littrainer.checkpoint import sharded_files

        for name, state in self.parts.items():
            sharded_files.write_parts(self.folder / name, state, group)
        self.parts = {}

    def add_to_seal(self) -> None:
        """Seal what is there so far."""
        if self.seal is not None:
            self.seal.add_all()

    def write(self) -> None:
        """Write what was deferred."""
        if self._write_weights is not None:
            self._write_weights(self.weights)
            self.add_to_seal()
        for name, value in self.objects.items():
            torch.save(value, self.folder / name)
            if os.path.getsize(self.folder / name) >= BYTES_OF_A_LARGE_FILE:
                self.add_to_seal()
        self.objects = {}
        if self._trainer_state is not None:
            (self.folder / TRAINER_STATE_NAME).write_text(self._trainer_state, "utf-8")


# The checkpoints that are being collected, by the folders that overridable methods are called with.
_open: dict[Path, CheckpointFiles] = {}


# ---- Parts of a checkpoint, which are also written by themselves -----------------------------------------------------


def write_model(model: nn.Module, folder: str, state_dict: dict[str, Any] | None = None) -> None:
    """Write weights and configuration, loadable with `from_pretrained`.

    Parameters:
        folder: created if it does not exist.
        state_dict: weights to write; the model's own by default.
    """
    logger.info(f"Saving model checkpoint to {folder}")
    write = functools.partial(write_weights, model, folder)
    checkpoint = _open.get(Path(folder))
    if checkpoint is None:
        write(state_dict)
    else:
        checkpoint.take_weights(model, state_dict, write)


def write_companions(folder: str, args: TrainingArguments, processing_class: Any) -> None:
    """Write what belongs to a model but its weights: the processing class, if there is one, and the arguments."""
    if processing_class is not None:
        processing_class.save_pretrained(folder)
    write_arguments(args, os.path.join(folder, TRAINING_ARGS_NAME))


def write_files(objects: dict[str, Any], folder: Path) -> None:
    """Write objects with torch.save, by file name, into the folder of a checkpoint or any other."""
    _files_in(folder).take(objects)


def write_parts(states: dict[str, Any], folder: Path) -> None:
    """Write this process's parts of states, by their folders' names in that of a checkpoint or any other."""
    _files_in(folder).take_parts(states)


def _files_in(folder: Path) -> CheckpointFiles:
    return _open.get(folder) or CheckpointFiles(StagedCheckpoint(folder))


# ---- A whole checkpoint ----------------------------------------------------------------------------------------------


def write_checkpoint(
    training: SavedTraining,
    folder: Path | None = None,
    is_complete: bool = False,
    further: dict[str, Any] | None = None,
    advice: str = "",
) -> str:
    """Write all that resuming needs, and return the folder; all processes call this together.

    Parameters:
        folder: by default `checkpoint-<step>` among the training's.
        is_complete: write what resuming needs, whatever `save_only_model` says.
        further: objects to write with torch.save, by file name, if they can be loaded safely.
        advice: the end of the error if they cannot.

    Raises:
        OSError: a file could not be written; earlier checkpoints are as they were.
        FailedElsewhere: another process could not write its part.
    """
    final = training.folder if folder is None else folder
    with contextlib.ExitStack() as unfinished:
        with parts_of_checkpoint(training.args, final, unfinished) as part, training.weights_to_save():
            files = CheckpointFiles(part)
            collect_files(training, files, is_complete)
            files.take(further or {})
            for name in further or {}:
                refuse_unsafe(files.folder / name, advice)
        with failing_together(f"writing {final}"):
            unfinished.close()
    return str(final)


def collect_files(training: SavedTraining, files: CheckpointFiles, is_complete: bool = False) -> None:
    """Collect a checkpoint's files, and write them unless they are deferred: this process's part, of several.

    Parameters:
        is_complete: what resuming needs too, whatever `save_only_model` says.
    """
    methods, folder = training.methods, str(files.folder)
    _open[files.folder] = files
    weights_are_finite = all(from_each(not names_of_sick(methods.model, with_buffers=True)))
    # What stage 3 of DeepSpeed splits is not in the model.
    if files.seal is not None and not hasattr(next(methods.model.parameters(), None), "ds_numel"):
        files.seal.weights_are_finite = weights_are_finite
    try:
        methods.save_model(folder, _internal_call=True)
        if not files.is_deferred:
            files.add_to_seal()
        if is_complete or not training.args.save_only_model:
            methods._save_optimizer_and_scheduler(folder)
            methods._save_scaler(folder)
            methods._save_rng_state(folder)
            files.take(_resume_record(training))
        if training.args.should_save:
            _note_exported_states(training)
            files.take({}, training.state.to_json())
    finally:
        del _open[files.folder]


def _resume_record(training: SavedTraining) -> dict[str, Any]:
    if training.resume_record is None:
        return {}
    rank, record = training.args.process_index, training.resume_record()
    files = {resume_record_name(rank): {name: record[name] for name in ("version", "data")}} if rank else {}
    return {**files, RESUME_RECORD_NAME: record} if training.args.should_save else files


def _note_exported_states(training: SavedTraining) -> None:
    states = training.state.stateful_callbacks
    for name, now in exported_states(list(filter(is_exportable, training.callbacks))).items():
        # If one class has several callbacks, each save adds their states to the list, as in transformers.
        before = states.get(name)
        states[name] = [*before, *(now if isinstance(now, list) else [now])] if isinstance(before, list) else now


def note_best_checkpoint(training: SavedTraining) -> None:
    """Note in the Trainer's state where the best checkpoint lies, which may be the one that is written next."""
    state = training.state
    if not state.best_global_step:
        return
    best = checkpoint_folder(training.run_dir, state.best_global_step)
    # The one that is being written takes its place when it is complete.
    if state.best_global_step == state.global_step or best.is_dir():
        state.best_model_checkpoint = str(best)
    if are_several():
        # Its path may be another one in each process, and only who writes checkpoints sees them for certain.
        leader = place_of(training.args, Path(training.run_dir)).leader
        state.best_model_checkpoint = from_each(state.best_model_checkpoint)[leader or 0]
