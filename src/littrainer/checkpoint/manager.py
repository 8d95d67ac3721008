"""The checkpoints of a training: staged, written, committed, pruned and uploaded, in the foreground or in a thread."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.arguments.choices import SaveStrategy
from littrainer.callbacks.state import TrainerState, export_states, is_exportable
from littrainer.checkpoint.atomic_write import STAGING_DIR, explain_full_disk
from littrainer.checkpoint.checksums import update_manifest
from littrainer.checkpoint.distributed_save import WriterRole, elect_writer, make_staging_folder, send_to_writer
from littrainer.checkpoint.host_copies import HostCopies
from littrainer.checkpoint.layout import RESUME_RECORD_NAME, checkpoint_folder, resume_record_name
from littrainer.checkpoint.retention import delete_all_but_best, prune_checkpoints
from littrainer.checkpoint.safe_loading import refuse_unsafe
from littrainer.checkpoint.store import get_store, open_store, run_in_thread
from littrainer.checkpoint.weights import find_nonfinite_weights
from littrainer.checkpoint.writer import StagedCheckpoint
from littrainer.distributed.collectives import (
    all_gather_object,
    get_writing_group,
    is_distributed,
    raise_on_all_ranks,
    run_with_keepalive,
)
from littrainer.distributed.environment import get_hang_timeout
from littrainer.runtime.notes import SAVE, part_of_training
from littrainer.runtime.remote_folder import get_remote_url

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.checkpoint.state_io import FullStateIO

logger = logging.getLogger(__name__)


class BackgroundSaveError(RuntimeError):
    """A checkpoint could not be written in the background; the reason is the cause of this error."""


@dataclass
class SavedTraining:
    """The training of which a checkpoint is written.

    Parameters:
        methods: the Trainer, whose methods write the files; subclasses may override each.
        run_dir: the folder that holds the training's checkpoints.
        callbacks: those whose states are exported, and the control.
        resume_record: returns what exact resuming needs; None if no training runs.
        weights_to_save: within it the model has the weights that are saved.
        when_complete: called with the folder of a checkpoint written in the background, and the state of its step.
    """

    methods: Any
    args: TrainingArguments
    state: TrainerState
    run_dir: str
    callbacks: list[Any]
    resume_record: Callable[[], dict[str, Any]] | None
    weights_to_save: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    when_complete: Callable[[str, TrainerState], None] = lambda folder, state: None

    @property
    def folder(self) -> Path:
        """The checkpoint of the current optimizer step."""
        return checkpoint_folder(self.run_dir, self.state.global_step)


@dataclass
class PendingSave:
    """A checkpoint that a thread writes, with the Trainer's state at its step."""

    folder: Path
    state: TrainerState
    writing: Future[None]
    when_complete: Callable[[str, TrainerState], None]

    def failure(self) -> str:
        """Return the message for a checkpoint that could not be written."""
        error = self.writing.exception()
        return (
            f"{self.folder} could not be written in the background ({type(error).__name__}: {error}). Checkpoints "
            "before it are as they were."
        )


class CheckpointManager:
    """Saves and prunes the checkpoints of one training; all processes call its methods together.

    Attributes:
        is_async: a thread writes copies of a checkpoint's tensors while training continues (`async_save`).
        pending: the checkpoint that the thread writes.
        facts: code, data and model that the training began with, if it has written them.
    """

    def __init__(self) -> None:
        self.is_async = False
        self.pending: PendingSave | None = None
        self.facts: dict[str, Any] | None = None
        # The checkpoint that this process completed last, until its `on_save` callbacks have run.
        self._written: str | None = None
        # Overridable save methods only get a path, by which they find the checkpoint that is collected.
        self._staged: StagedCheckpoint | None = None
        self._roles: dict[Path, WriterRole] = {}
        # Their memory is kept from save to save.
        self._copies = HostCopies()
        self._has_warned_of_parts = False

    # ---- The folder of a training ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def open_folder(
        self,
        args: TrainingArguments,
        run_dir: Callable[[], str],
        recorded: Callable[[Path], AbstractContextManager[None]],
    ) -> Iterator[None]:
        """Lock the folder during a training that saves checkpoints or uploads, and upload it, in the writing process.

        Parameters:
            run_dir: returns the folder; it is only called if something is saved.
            recorded: the context of a run, which writes what it begins with into the folder.
        """
        has_saves = args.save_strategy != SaveStrategy.NO or args.save_minutes is not None or args.enable_jit_checkpoint
        has_url = get_remote_url(args.output_dir) is not None
        if not has_saves and not has_url:
            yield
            return
        folder, is_uploaded = Path(run_dir()), False
        with ExitStack() as contexts:
            with raise_on_all_ranks(f"claiming {folder} for checkpoints"):
                if self.is_writer(args, folder):
                    store = contexts.enter_context(open_store(folder))
                    if has_url:
                        is_uploaded = contexts.enter_context(store.upload(get_hang_timeout(args))) is not None
                    contexts.enter_context(recorded(folder))
            yield
            if has_url:
                with raise_on_all_ranks(f"uploading {folder}"):
                    run_with_keepalive(lambda: store.finish_uploads() if is_uploaded else None)
            # No process finds anything half-deleted in the folder afterwards.
            with raise_on_all_ranks(f"tidying up {folder}"):
                contexts.close()

    def role(self, args: TrainingArguments, run_dir: str | Path) -> WriterRole:
        """Return the role of this process in writing the checkpoints of a folder, which is found out once."""
        folder = Path(run_dir)
        if folder not in self._roles:
            self._roles[folder] = elect_writer(args, folder)
        return self._roles[folder]

    def is_writer(self, args: TrainingArguments, run_dir: str | Path) -> bool:
        """Return whether this process writes, and deletes, the checkpoints of its disk."""
        return self.role(args, run_dir).is_writer

    # ---- A save ------------------------------------------------------------------------------------------------------

    def save(self, training: SavedTraining) -> str:
        """Write the checkpoint of the current step, prune older ones, and return its folder.

        Raises:
            OSError: a file could not be written; earlier checkpoints are unchanged.
            FailedElsewhere: another process could not write its part.
        """
        self.wait()
        self.record_best_checkpoint(training)
        folder = self.write(training, training.folder)
        if self.is_writer(training.args, training.run_dir):
            self._written = folder
            prune_checkpoints(training.args, training.state, training.run_dir, folder)
        return folder

    def write(
        self,
        training: SavedTraining,
        final: Path,
        is_complete: bool = False,
        further: dict[str, Any] | None = None,
        advice: str = "",
    ) -> str:
        """Write all that resuming needs into a folder, and return it.

        Parameters:
            is_complete: write what resuming needs, whatever `save_only_model` says.
            further: objects to write with torch.save, by file name, if they can be loaded safely.
            advice: the end of the error if they cannot.
        """
        with ExitStack() as commit:
            with self._stage(training.args, final, commit) as staged, training.weights_to_save():
                self._collect(training, staged, is_complete)
                staged.write_objects(further or {})
                for name in further or {}:
                    refuse_unsafe(staged.folder / name, advice)
            with raise_on_all_ranks(f"writing {final}"):
                commit.close()
        return str(final)

    def save_in_background(self, training: SavedTraining) -> None:
        """Copy what the checkpoint of the current step holds, and let a thread write it, after the save before."""
        self.wait()
        final, args = training.folder, training.args
        self.record_best_checkpoint(training)
        with ExitStack() as commit:
            with self._stage(args, final, commit) as staged, training.weights_to_save():
                is_writer = staged.is_deferred = staged.manifest is not None
                # Another process has to find the files that it completes.
                staged.defers_shards = not self.role(args, final.parent).some_have_own_folder
                self._collect(training, staged)
                values, writers = [value for value, _ in staged.deferred], [write for _, write in staged.deferred]
                values, staged.parts = self._copies.copy((values, staged.parts))
                staged.deferred = list(zip(values, writers, strict=True))
            group = get_writing_group() if staged.parts else None
            state = copy.copy(training.state)
            state.log_history = list(state.log_history)
            unfinished = commit.pop_all()

        def write() -> None:
            with unfinished:
                # Before anything that can fail in one process alone.
                staged.write_collected_shards(group)
                staged.write_deferred()
            if is_writer:
                prune_checkpoints(args, state, training.run_dir, str(final))

        writing = run_in_thread(write, f"saving {final.name}")
        self.pending = PendingSave(final, state, writing, training.when_complete)

    @contextlib.contextmanager
    def _stage(self, args: TrainingArguments, final: Path, commit: ExitStack) -> Iterator[StagedCheckpoint]:
        """Write this process's files of a checkpoint in the block; to close `commit` then completes the checkpoint."""
        staged = StagedCheckpoint(final.parent / STAGING_DIR / final.name)
        if not is_distributed():
            staged.manifest = commit.enter_context(get_store(final.parent).stage(final))
            yield staged
            return
        role, action = self.role(args, final.parent), f"writing {final}"
        with ExitStack() as own_folder:
            with raise_on_all_ranks(action):
                if role.is_writer:
                    staged.manifest = commit.enter_context(get_store(final.parent).stage(final))
                elif role.has_own_folder:
                    staged.folder = own_folder.enter_context(make_staging_folder(final, args.process_index))
            # Before the other processes are notified.
            with raise_on_all_ranks(action), explain_full_disk(staged.folder, final):
                yield staged
            if role.some_have_own_folder:
                send_to_writer(staged.folder, role, action)

    def _collect(self, training: SavedTraining, staged: StagedCheckpoint, is_complete: bool = False) -> None:
        """Let the Trainer's methods write a checkpoint's files: weights, optimizer, random states, trainer state."""
        methods, args, folder = training.methods, training.args, str(staged.folder)
        has_optimizer = is_complete or not args.save_only_model
        sick = find_nonfinite_weights(
            methods.model, with_buffers=True, optimizer=methods.optimizer if has_optimizer else None
        )
        are_finite = all(all_gather_object(not sick))
        # The parameters that stage 3 of DeepSpeed shards are not in the model.
        if staged.manifest is not None and not hasattr(next(methods.model.parameters(), None), "ds_numel"):
            staged.manifest.weights_are_finite = are_finite
        self._staged = staged
        try:
            methods.save_model(folder, _internal_call=True)
            if has_optimizer:
                methods._save_optimizer_and_scheduler(folder)
                methods._save_scaler(folder)
                methods._save_rng_state(folder)
                staged.write_objects(_resume_records(training))
            if args.should_save:
                _export_callback_states(training)
                staged.write_trainer_state(training.state.to_json())
        finally:
            self._staged = None

    def staged(self, folder: str | Path) -> StagedCheckpoint:
        """Return the checkpoint that is collected in a folder, or what writes into any other folder at once."""
        if self._staged is not None and self._staged.folder == Path(folder):
            return self._staged
        return StagedCheckpoint(Path(folder))

    def commit_changes(self, folder: str | None = None) -> None:
        """Add what `on_save` callbacks did to the manifest, and begin to upload, in the process that wrote the files.

        Parameters:
            folder: the checkpoint; by default the last one that `save` wrote.
        """
        folder, self._written = folder or self._written, None
        if folder is not None and Path(folder).is_dir():
            update_manifest(Path(folder))
            if (remote := get_store(Path(folder).parent).remote) is not None:
                remote.begin()

    def record_best_checkpoint(self, training: SavedTraining) -> None:
        """Note the path of the best checkpoint, which may be the one that is written next, in the Trainer's state."""
        state = training.state
        if not state.best_global_step:
            return
        best = checkpoint_folder(training.run_dir, state.best_global_step)
        # The one that is being written takes its place when it is complete.
        if state.best_global_step == state.global_step or best.is_dir():
            state.best_model_checkpoint = str(best)
        if is_distributed():
            # Its path may differ between processes, and only the one that writes checkpoints sees them for certain.
            writer = self.role(training.args, training.run_dir).writer
            state.best_model_checkpoint = all_gather_object(state.best_model_checkpoint)[writer or 0]

    def delete_all_but_best(self, args: TrainingArguments, run_dir: str, best: str | None) -> None:
        """Delete all checkpoints but the best when a training ends, if `save_total_limit` is 1."""
        if best is not None and args.save_total_limit == 1 and self.is_writer(args, run_dir):
            delete_all_but_best(args, run_dir, best)

    # ---- The save in the background ----------------------------------------------------------------------------------

    def can_copy(self, storage: FullStateIO) -> bool:
        """Return whether a thread can write this checkpoint; if not, warn once, and training waits."""
        if self.is_async and not storage.can_be_copied and not self._has_warned_of_parts:
            logger.warning(
                "async_save: what version 1 of FSDP shards cannot be written in the background, so training waits for "
                "its checkpoints. Leave fsdp_config['version'] at 2."
            )
            self._has_warned_of_parts = True
        return self.is_async and storage.can_be_copied

    def wait(self) -> None:
        """Wait for the checkpoint that the thread writes, if there is one.

        Raises:
            BackgroundSaveError: it could not be written.
        """
        if (save := self.pending) is not None:
            self._end_pending(save)
            with part_of_training(SAVE):
                with raise_on_all_ranks(f"writing {save.folder}"):
                    if (error := save.writing.exception()) is not None:
                        raise BackgroundSaveError(save.failure()) from error
                save.when_complete(str(save.folder), save.state)

    def close(self) -> None:
        """End the saves of a training, by an error if one is pending: wait for it, and log its own error."""
        try:
            if (save := self.pending) is not None:
                self._end_pending(save)
                if (error := save.writing.exception()) is not None:
                    logger.error(save.failure(), exc_info=error)
        finally:
            self.is_async, self._copies = False, HostCopies()

    def _end_pending(self, save: PendingSave) -> None:
        self.pending = None
        wait([save.writing])
        self._copies.release()


def _resume_records(training: SavedTraining) -> dict[str, Any]:
    if training.resume_record is None:
        return {}
    rank, record = training.args.process_index, training.resume_record()
    files = {resume_record_name(rank): {name: record[name] for name in ("version", "data")}} if rank else {}
    return {**files, RESUME_RECORD_NAME: record} if training.args.should_save else files


def _export_callback_states(training: SavedTraining) -> None:
    states = training.state.stateful_callbacks
    for name, now in export_states(list(filter(is_exportable, training.callbacks))).items():
        # If one class has several callbacks, each save adds their states to the list, as in transformers.
        before = states.get(name)
        states[name] = [*before, *(now if isinstance(now, list) else [now])] if isinstance(before, list) else now
