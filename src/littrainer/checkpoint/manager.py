"""The manager that writes, prunes and uploads a training's checkpoints, also in the background."""

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
    """Error of a background save; `__cause__` is the reason."""


@dataclass
class SavedTraining:
    """The parts of a training that are saved.

    Parameters:
        methods: the Trainer, whose overridable methods write the files.
        resume_record: None outside of a training.
        weights_to_save: a context in which the model has the weights to save.
        when_complete: called after a background save.
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
        return checkpoint_folder(self.run_dir, self.state.global_step)


@dataclass
class PendingSave:
    folder: Path
    state: TrainerState
    writing: Future[None]
    when_complete: Callable[[str, TrainerState], None]

    def failure(self) -> str:
        error = self.writing.exception()
        return (
            f"{self.folder} could not be written in the background ({type(error).__name__}: {error}). Earlier "
            "checkpoints are unchanged."
        )


class CheckpointManager:
    """Manager of a training's checkpoints; all processes call its methods together."""

    def __init__(self) -> None:
        self.is_async = False
        self.pending: PendingSave | None = None
        # Description of code, data and model in the run's record.
        self.facts: dict[str, Any] | None = None
        # The last checkpoint, until its `on_save` callbacks have run.
        self._written: str | None = None
        # Overridable save methods get only a path, by which they find this.
        self._staged: StagedCheckpoint | None = None
        self._roles: dict[Path, WriterRole] = {}
        self._copies = HostCopies()
        self._has_warned_of_fsdp1 = False

    # ---- The folder of a training ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def open_folder(
        self,
        args: TrainingArguments,
        run_dir: Callable[[], str],
        recorded: Callable[[Path], AbstractContextManager[None]],
    ) -> Iterator[None]:
        """Lock the folder and upload it to its URL during a training, in the writer only.

        Parameters:
            recorded: context that writes the run's record.
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
            with raise_on_all_ranks(f"tidying up {folder}"):
                contexts.close()

    def role(self, args: TrainingArguments, run_dir: str | Path) -> WriterRole:
        folder = Path(run_dir)
        if folder not in self._roles:
            self._roles[folder] = elect_writer(args, folder)
        return self._roles[folder]

    def is_writer(self, args: TrainingArguments, run_dir: str | Path) -> bool:
        return self.role(args, run_dir).is_writer

    # ---- Save --------------------------------------------------------------------------------------------------------

    def save(self, training: SavedTraining) -> str:
        """Write the checkpoint of the current step, and prune older checkpoints."""
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
        extra_objects: dict[str, Any] | None = None,
        advice: str = "",
    ) -> str:
        """Write a checkpoint and return its folder.

        Parameters:
            is_complete: ignore `save_only_model`.
            extra_objects: file name -> object for torch.save.
            advice: end of the error for an unsafe object.
        """
        with ExitStack() as commit:
            with self._stage(training.args, final, commit) as staged, training.weights_to_save():
                self._collect(training, staged, is_complete)
                staged.write_objects(extra_objects or {})
                for name in extra_objects or {}:
                    refuse_unsafe(staged.folder / name, advice)
            with raise_on_all_ranks(f"writing {final}"):
                commit.close()
        return str(final)

    def save_in_background(self, training: SavedTraining) -> None:
        """Copy the states of the current step, and write the checkpoint in a thread."""
        self.wait()
        final, args = training.folder, training.args
        self.record_best_checkpoint(training)
        with ExitStack() as commit:
            with self._stage(args, final, commit) as staged, training.weights_to_save():
                is_writer = staged.is_deferred = staged.manifest is not None
                staged.defers_shards = not self.role(args, final.parent).any_sends_files
                self._collect(training, staged)
                values, writers = [value for value, _ in staged.deferred], [write for _, write in staged.deferred]
                values, staged.shards = self._copies.copy((values, staged.shards))
                staged.deferred = list(zip(values, writers, strict=True))
            group = get_writing_group() if staged.shards else None
            state = copy.copy(training.state)
            state.log_history = list(state.log_history)
            unfinished = commit.pop_all()

        def write() -> None:
            with unfinished:
                # Collective, so before steps that may fail in a single process.
                staged.write_collected_shards(group)
                staged.write_deferred()
            if is_writer:
                prune_checkpoints(args, state, training.run_dir, str(final))

        writing = run_in_thread(write, f"saving {final.name}")
        self.pending = PendingSave(final, state, writing, training.when_complete)

    @contextlib.contextmanager
    def _stage(self, args: TrainingArguments, final: Path, commit: ExitStack) -> Iterator[StagedCheckpoint]:
        """Yield a checkpoint to write to; closing `commit` afterwards completes it."""
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
                elif role.sends_files:
                    staged.folder = own_folder.enter_context(make_staging_folder(final, args.process_index))
            with raise_on_all_ranks(action), explain_full_disk(staged.folder, final):
                yield staged
            if role.any_sends_files:
                send_to_writer(staged.folder, role, action)

    def _collect(self, training: SavedTraining, staged: StagedCheckpoint, is_complete: bool = False) -> None:
        methods, args, folder = training.methods, training.args, str(staged.folder)
        has_optimizer = is_complete or not args.save_only_model
        optimizer = methods.optimizer if has_optimizer else None
        nonfinite = find_nonfinite_weights(methods.model, with_buffers=True, optimizer=optimizer)
        are_finite = all(all_gather_object(not nonfinite))
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
        """Return the checkpoint being written in this folder, or else a new writer."""
        if self._staged is not None and self._staged.folder == Path(folder):
            return self._staged
        return StagedCheckpoint(Path(folder))

    def commit_changes(self, folder: str | None = None) -> None:
        """Add files of `on_save` callbacks to the manifest of the given or last checkpoint, and start the upload."""
        folder, self._written = folder or self._written, None
        if folder is not None and Path(folder).is_dir():
            update_manifest(Path(folder))
            if (remote := get_store(Path(folder).parent).remote) is not None:
                remote.start()

    def record_best_checkpoint(self, training: SavedTraining) -> None:
        """Record the best checkpoint, which may be the next to be written, in the Trainer's state."""
        state = training.state
        if not state.best_global_step:
            return
        best = checkpoint_folder(training.run_dir, state.best_global_step)
        if state.best_global_step == state.global_step or best.is_dir():
            state.best_model_checkpoint = str(best)
        if is_distributed():
            # Paths may differ between processes, and only the writer sees the checkpoints for certain.
            writer = self.role(training.args, training.run_dir).writer
            state.best_model_checkpoint = all_gather_object(state.best_model_checkpoint)[writer or 0]

    def delete_all_but_best(self, args: TrainingArguments, run_dir: str, best: str | None) -> None:
        if best is not None and args.save_total_limit == 1 and self.is_writer(args, run_dir):
            delete_all_but_best(args, run_dir, best)

    # ---- Background save ---------------------------------------------------------------------------------------------

    def can_copy(self, storage: FullStateIO) -> bool:
        """Return whether this save can run in the background; warn if `async_save` is on and it cannot."""
        if self.is_async and not storage.can_be_copied and not self._has_warned_of_fsdp1:
            logger.warning(
                "async_save: models sharded by version 1 of FSDP cannot be saved in the background, so training waits "
                "for checkpoints. Leave fsdp_config['version'] at 2."
            )
            self._has_warned_of_fsdp1 = True
        return self.is_async and storage.can_be_copied

    def wait(self) -> None:
        """Wait for the pending save, and raise its error."""
        if (save := self.pending) is not None:
            self._end_pending(save)
            with part_of_training(SAVE):
                with raise_on_all_ranks(f"writing {save.folder}"):
                    if (error := save.writing.exception()) is not None:
                        raise BackgroundSaveError(save.failure()) from error
                save.when_complete(str(save.folder), save.state)

    def close(self) -> None:
        """Wait for the pending save, and log its error."""
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
        # Several callbacks of a class share a list, as in transformers.
        before = states.get(name)
        states[name] = [*before, *(now if isinstance(now, list) else [now])] if isinstance(before, list) else now
