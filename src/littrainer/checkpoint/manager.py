"""The manager of a training's checkpoints, which saves, rotates and resumes them; saves can run in the background."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import logging
import os
import socket
import zlib
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.arguments.choices import SaveStrategy
from littrainer.callbacks.state import TrainerState, export_states, is_exportable
from littrainer.checkpoint.atomic_write import STAGING_DIR, explain_full_disk
from littrainer.checkpoint.checksums import MANIFEST_NAME, update_manifest
from littrainer.checkpoint.distributed_save import WriterRole, elect_writer, gather_files_to_writer, make_staging_folder
from littrainer.checkpoint.host_copies import HostCopies
from littrainer.checkpoint.layout import (
    LAST_CHECKPOINT,
    OPTIMIZER_NAME,
    PREFIX_CHECKPOINT_DIR,
    RANDOM_STATE_NAME,
    RESUME_RECORD_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    checkpoint_folder,
    checkpoint_step,
    resume_record_name,
)
from littrainer.checkpoint.remote import download_checkpoint, download_newest
from littrainer.checkpoint.retention import (
    find_best_checkpoints,
    get_last_resumable,
    rotate_checkpoints,
    sort_checkpoints,
    thin_checkpoint,
)
from littrainer.checkpoint.safe_loading import refuse_unsafe
from littrainer.checkpoint.store import get_store, open_store, run_in_thread
from littrainer.checkpoint.verification import find_damage, find_last_intact, find_missing, inspect_checkpoint
from littrainer.checkpoint.weights import find_nonfinite_weights
from littrainer.checkpoint.writer import CheckpointWriter
from littrainer.distributed.collectives import (
    all_gather_object,
    broadcast_object,
    get_writing_group,
    is_distributed,
    raise_on_all_ranks,
    run_with_keepalive,
)
from littrainer.distributed.environment import TRAININGS, get_hang_timeout, get_reports_folder, rank
from littrainer.runtime.atomic_files import write_atomically
from littrainer.runtime.notes import SAVE, part_of_training
from littrainer.runtime.remote_folder import get_remote_url, local_folder

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.checkpoint.state_io import FullStateIO

logger = logging.getLogger(__name__)

NEEDED_TO_RESUME = (TRAINER_STATE_NAME, OPTIMIZER_NAME, SCHEDULER_NAME, RANDOM_STATE_NAME)
# Overridable method of the Trainer -> files that it reads.
FILES_READ_BY_METHOD = {
    "_load_optimizer_and_scheduler": (OPTIMIZER_NAME, SCHEDULER_NAME),
    "_load_rng_state": (RANDOM_STATE_NAME,),
}
# `resume_from_checkpoint="auto"`: the intact checkpoint with the highest step, or a fresh start.
AUTO = "auto"
NO_SUCH_FOLDER = "finds no such folder"
# Number of the script's next training; a restarted script recognizes its trainings by their numbers.
_trainings = itertools.count()


class BackgroundSaveError(RuntimeError):
    """Error of a background save; `__cause__` is the reason."""


@dataclass
class SaveRequest:
    """Input of a save: the objects to save, the methods that write them, and the folder.

    Parameters:
        hooks: the Trainer, whose overridable methods write the files.
        resume_record: makes the content of the file `RESUME_RECORD_NAME`; None outside of a training.
        weights_to_save: context in which the model holds the weights to save, such as averaged weights.
        when_complete: called by `wait` in the training's thread, with folder and state of a completed background save.
    """

    hooks: Any
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


def get_last_checkpoint(folder: str | Path, without: Collection[str] = ()) -> str | None:
    """Return the intact checkpoint with the highest step in a folder, or None.

    Damaged and non-finite checkpoints are skipped with a warning, and thinned checkpoints without a warning. If the
    folder mirrors a URL, the checkpoint with the highest step there is downloaded first.

    Parameters:
        folder: an output folder with `checkpoint-<step>` folders, or its URL.
        without: names of checkpoints to skip.

    Raises:
        FileNotFoundError: there is no such folder.
        RemoteFolderError: an object at the URL could not be read.

    Examples:
        >>> from littrainer import get_last_checkpoint
        >>> get_last_checkpoint(checkpoint.parent) == str(checkpoint)
        True
    """
    folder = local_folder(os.fspath(folder))
    if get_remote_url(folder) is not None:
        without = {*without, *download_newest(folder, without)}
    return find_last_intact(folder, without)


class CheckpointManager:
    """Manager of a training's checkpoints.

    All processes call `save`, `write`, `save_in_background`, `wait` and `restore` together. `prune` runs only in the
    writing process; a background save calls it in its own thread.
    """

    latest = staticmethod(get_last_checkpoint)

    def __init__(self) -> None:
        self.is_async = False
        self.pending: PendingSave | None = None
        # Description of code, data and model in the run's record.
        self.facts: dict[str, Any] | None = None
        # Start and end of the training, for a run's record that is written after the training.
        self.times: dict[str, Any] = {}
        # The last checkpoint, in the writing process, until its `on_save` callbacks have run.
        self._written: str | None = None
        # The Trainer's save methods get only a folder, and call `get_writer(folder)` for this writer.
        self._writer: CheckpointWriter | None = None
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

        Do nothing if the training neither saves nor has a URL.

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

    def save(self, request: SaveRequest) -> str:
        """Write the checkpoint of the current step, and prune older checkpoints."""
        self.wait()
        self.record_best_checkpoint(request)
        folder = self.write(request, request.folder)
        if self.is_writer(request.args, request.run_dir):
            self._written = folder
            self.prune(request.args, request.state, request.run_dir, folder)
        return folder

    def write(
        self,
        request: SaveRequest,
        final: Path,
        with_optimizer: bool = False,
        extra_objects: dict[str, Any] | None = None,
        advice: str = "",
    ) -> str:
        """Write a checkpoint and return its folder.

        Parameters:
            with_optimizer: save optimizer, schedule and random states even with `save_only_model`.
            extra_objects: file name -> object for torch.save.
            advice: last sentence of the error for an extra object that `refuse_unsafe` rejects.
        """
        with ExitStack() as commit:
            with self._open_writer(request.args, final, commit) as writer, request.weights_to_save():
                self._write_states(request, writer, with_optimizer)
                writer.write_objects(extra_objects or {})
                for name in extra_objects or {}:
                    refuse_unsafe(writer.folder / name, advice)
            with raise_on_all_ranks(f"writing {final}"):
                commit.close()
        return str(final)

    def save_in_background(self, request: SaveRequest) -> None:
        """Copy the states of the current step, and write the checkpoint in a thread."""
        self.wait()
        final, args = request.folder, request.args
        self.record_best_checkpoint(request)
        with ExitStack() as commit:
            with self._open_writer(args, final, commit) as writer, request.weights_to_save():
                is_writer = writer.is_deferred = writer.manifest is not None
                writer.defers_shards = not self.role(args, final.parent).any_sends_files
                self._write_states(request, writer)
                values, writer.shards = self._copies.copy(([value for value, _ in writer.deferred], writer.shards))
                write_functions = [write for _, write in writer.deferred]
                writer.deferred = list(zip(values, write_functions, strict=True))
            # Made before the thread, since making a group is collective.
            group = get_writing_group() if writer.shards else None
            state = copy.copy(request.state)
            state.log_history = list(state.log_history)
            unfinished = commit.pop_all()

        def write() -> None:
            with unfinished:
                # Shards come first, since all processes write them together: if `write_deferred` failed here before,
                # the other processes would wait for this process.
                writer.write_collected_shards(group)
                writer.write_deferred()
            if is_writer:
                self.prune(args, state, request.run_dir, str(final))

        writing = run_in_thread(write, f"saving {final.name}")
        self.pending = PendingSave(final, state, writing, request.when_complete)

    @contextlib.contextmanager
    def _open_writer(self, args: TrainingArguments, final: Path, commit: ExitStack) -> Iterator[CheckpointWriter]:
        """Yield the writer of a staging folder; the caller closes `commit` later, which renames the folder."""
        writer = CheckpointWriter(final.parent / STAGING_DIR / final.name)
        if not is_distributed():
            writer.manifest = commit.enter_context(get_store(final.parent).open_staging_folder(final))
            yield writer
            return
        role, action = self.role(args, final.parent), f"writing {final}"
        with ExitStack() as own_folder:
            with raise_on_all_ranks(action):
                if role.is_writer:
                    writer.manifest = commit.enter_context(get_store(final.parent).open_staging_folder(final))
                elif role.sends_files:
                    writer.folder = own_folder.enter_context(make_staging_folder(final, args.process_index))
            with raise_on_all_ranks(action), explain_full_disk(writer.folder, final):
                yield writer
            if role.any_sends_files:
                gather_files_to_writer(writer.folder, role, action)

    def _write_states(self, request: SaveRequest, writer: CheckpointWriter, with_optimizer: bool = False) -> None:
        hooks, args, folder = request.hooks, request.args, str(writer.folder)
        has_optimizer = with_optimizer or not args.save_only_model
        optimizer = hooks.optimizer if has_optimizer else None
        nonfinite = find_nonfinite_weights(hooks.model, with_buffers=True, optimizer=optimizer)
        are_finite = all(all_gather_object(not nonfinite))
        # Under ZeRO 3, whose parameters are empty outside of forward passes, the finiteness is unknown.
        if writer.manifest is not None and not hasattr(next(hooks.model.parameters(), None), "ds_numel"):
            writer.manifest.weights_are_finite = are_finite
        self._writer = writer
        try:
            hooks.save_model(folder, _internal_call=True)
            if has_optimizer:
                hooks._save_optimizer_and_scheduler(folder)
                hooks._save_scaler(folder)
                hooks._save_rng_state(folder)
                writer.write_objects(_resume_records(request))
            if args.should_save:
                _export_callback_states(request)
                writer.write_trainer_state(request.state.to_json())
        finally:
            self._writer = None

    def get_writer(self, folder: str | Path) -> CheckpointWriter:
        """Return the CheckpointWriter that a save uses for this folder, or a new one, which defers no files."""
        if self._writer is not None and self._writer.folder == Path(folder):
            return self._writer
        return CheckpointWriter(Path(folder))

    def finish_save(self, folder: str | None = None) -> None:
        """Update the manifest for files that `on_save` callbacks wrote, and start the checkpoint's upload.

        Parameters:
            folder: the checkpoint's folder; None for the checkpoint that `save` wrote last.
        """
        folder, self._written = folder or self._written, None
        if folder is not None and Path(folder).is_dir():
            update_manifest(Path(folder))
            if (remote := get_store(Path(folder).parent).remote) is not None:
                remote.start()

    def record_best_checkpoint(self, request: SaveRequest) -> None:
        """Set `best_model_checkpoint` in the Trainer's state, to an existing checkpoint or to the requested save."""
        state = request.state
        if not state.best_global_step:
            return
        best = checkpoint_folder(request.run_dir, state.best_global_step)
        if state.best_global_step == state.global_step or best.is_dir():
            state.best_model_checkpoint = str(best)
        if is_distributed():
            # Use the writer's path: paths may differ between processes, and some cannot see the writer's disk.
            writer_rank = self.role(request.args, request.run_dir).writer_rank
            state.best_model_checkpoint = all_gather_object(state.best_model_checkpoint)[writer_rank or 0]

    # ---- Rotation ----------------------------------------------------------------------------------------------------

    def prune(self, args: TrainingArguments, state: TrainerState, run_dir: str, newest: str) -> None:
        """Delete and thin older checkpoints after a save, in the writer only.

        Parameters:
            newest: the checkpoint last written, whatever its step.
        """
        limit, best, protected = args.save_total_limit, state.best_model_checkpoint, []
        if args.save_total_limit_best is not None and (limit is None or limit > 0):
            # Rotation keeps the last `save_total_limit` checkpoints (1 if it is None), and also the best ones.
            protected = [*find_best_checkpoints(args, state, run_dir), str(Path(best or ""))]
            limit, best = limit or 1, None
        rotate_checkpoints(run_dir, limit, best, use_mtime=True, newest=newest, protected=protected)
        if args.keep_optimizer_states is None:
            return
        # If a manifest is missing, checkpoints are sorted by time or step, so `newest` may not come last.
        newest = str(Path(newest))
        ordered = [*(path for path in sort_checkpoints(run_dir, use_mtime=True) if path != newest), newest]
        complete = {*ordered[-args.keep_optimizer_states :], get_last_resumable(ordered)}
        for path in ordered:
            if path not in complete:
                thin_checkpoint(Path(path))

    def delete_all_but_best(self, args: TrainingArguments, run_dir: str, best: str | None) -> None:
        """Keep only the best checkpoint after a training with `save_total_limit=1`; rotation keeps the newest too."""
        if best is None or args.save_total_limit != 1 or args.save_total_limit_best is not None:
            return
        # If the best checkpoint is in another folder, the deletion would leave no checkpoint in this folder.
        if self.is_writer(args, run_dir) and Path(best).is_dir() and Path(best).parent.samefile(run_dir):
            for path in sort_checkpoints(run_dir):
                if os.path.realpath(path) != os.path.realpath(best):
                    get_store(run_dir).delete(path)

    # ---- Resume ------------------------------------------------------------------------------------------------------

    def restore(
        self,
        resume_from_checkpoint: str | bool | None,
        args: TrainingArguments,
        overridden: Collection[str],
        load_model: Callable[[str], None],
    ) -> Path | None:
        """Choose the checkpoint to resume from, and load its model; return its folder, or None for a fresh start.

        Parameters:
            overridden: methods in `FILES_READ_BY_METHOD` that a script overrides; their files may be missing.
            load_model: the overridable `_load_from_checkpoint`.
        """
        optional = {name for method in overridden for name in FILES_READ_BY_METHOD[method]}
        needed = [name for name in NEEDED_TO_RESUME if name not in optional]
        if is_distributed():
            checkpoint = self._choose_together(resume_from_checkpoint, args, needed)
        else:
            checkpoint = self.find(resume_from_checkpoint, args.output_dir, needed)
        if checkpoint is not None:
            with raise_on_all_ranks(f"loading the model in {checkpoint}"):
                load_model(str(checkpoint))
        return checkpoint

    def _choose_together(
        self, resume_from_checkpoint: str | bool | None, args: TrainingArguments, needed: Collection[str]
    ) -> Path | None:
        """Return rank 0's choice in all processes.

        If a checkpoint is damaged on any disk, rank 0 chooses again; if the caller gave its folder, raise a ValueError.
        """
        resumes = all_gather_object(bool(resume_from_checkpoint))
        if len(set(resumes)) > 1:
            raise ValueError(
                "Some processes resume from a checkpoint, and process "
                f"{', '.join(str(rank) for rank, does in enumerate(resumes) if not does)} does not: give all of them "
                "the same resume_from_checkpoint."
            )
        is_newest_requested = broadcast_object(resume_from_checkpoint in (True, LAST_CHECKPOINT, AUTO))
        skipped: set[str] = set()

        def choose() -> Path | None:
            return None if args.process_index else self.find(resume_from_checkpoint, args.output_dir, needed, skipped)

        while True:
            with raise_on_all_ranks("looking for the checkpoint to resume from"):
                choice = run_with_keepalive(choose)
                identity = None if choice is None else _identity(choice)
            folder, identity = broadcast_object((choice, identity))
            if folder is None or identity is None:
                return None
            if get_remote_url(folder) is not None:
                fetch = functools.partial(download_checkpoint, folder)
                with raise_on_all_ranks(f"downloading {folder}"):
                    run_with_keepalive(fetch if args.local_process_index == 0 else lambda: None)
            problems = enumerate(all_gather_object(_find_problem(folder, identity, args)))
            text = " ".join(f"Process {rank} on {problem}" for rank, problem in problems if problem is not None)
            if not text:
                return folder
            # `find` ignores `skipped` for a folder named "last-checkpoint" or "auto"; the error ends the loop.
            if not is_newest_requested or folder.name in skipped:
                raise ValueError(f"The checkpoint {folder} cannot be resumed in all processes. {text}")
            if NO_SUCH_FOLDER in text:
                raise ValueError(
                    f"The newest checkpoint of the first process is {os.path.abspath(folder)}. {text} Write "
                    "checkpoints to a disk that all nodes share, copy the folder to the others, or train with "
                    "save_on_each_node=True."
                )
            if args.process_index == 0:
                logger.warning("Skipping the checkpoint %s, which is not intact on all disks. %s", folder, text)
            skipped.add(folder.name)

    def find(
        self,
        resume_from_checkpoint: str | bool | None,
        output_dir: str,
        needed: Collection[str] = NEEDED_TO_RESUME,
        without: Collection[str] = (),
    ) -> Path | None:
        """Return the folder that `train(resume_from_checkpoint=...)` means; None for a fresh start.

        Parameters:
            resume_from_checkpoint: a folder or its URL, True, "auto" or "last-checkpoint".
            needed: files without which a checkpoint cannot be resumed.
            without: names to skip in the search for the highest step.
        """
        if not resume_from_checkpoint:
            return None
        path: str | bool = resume_from_checkpoint
        # "last-checkpoint" means a folder of this name in the working directory or output_dir, else the checkpoint with
        # the highest step.
        if path == LAST_CHECKPOINT and not Path(LAST_CHECKPOINT).is_dir():
            pushed = Path(output_dir) / LAST_CHECKPOINT
            path = str(pushed) if pushed.is_dir() else True
        starts_if_none = path == AUTO and not Path(AUTO).is_dir()
        if path is True or starts_if_none:
            newest = self.latest(output_dir, without) if Path(output_dir).is_dir() else None
            if newest is None and starts_if_none:
                return None
            if newest is None:
                raise ValueError(
                    f"No valid checkpoint found in output directory ({get_remote_url(output_dir) or output_dir}): "
                    f"resume_from_checkpoint={resume_from_checkpoint}, but there is no intact checkpoint-<step> "
                    "folder. Start without resuming, give the checkpoint's folder, or set "
                    "resume_from_checkpoint='auto'."
                )
            path = newest
        folder = Path(local := local_folder(str(path)))
        if local != str(path):
            download_checkpoint(folder)
        if not folder.is_dir():
            advice = "Give the path of a checkpoint-<step> folder, or True for the newest one in output_dir."
            if str(path).lower() in ("true", "false"):
                advice = (
                    f"{path!r} is text: write {str(path).capitalize()} without quotes, or on a command line "
                    "--resume_from_checkpoint auto, which resumes the newest checkpoint if there is one."
                )
            raise ValueError(
                f"Can't find a valid checkpoint at {get_remote_url(folder) or folder}: there is no such folder. "
                f"{advice}"
            )
        inspection = inspect_checkpoint(folder)
        if inspection.manifest.is_thinned:
            raise ValueError(
                f"The checkpoint {folder} was thinned to its weights (keep_optimizer_states), so training cannot "
                f"resume from it. Resume from {self.latest(folder.parent) or 'a complete one'}, or load its model with "
                "from_pretrained."
            )
        if missing := find_missing(inspection.files, needed):
            advice = "Resume from another checkpoint, or load its model with from_pretrained and start a new training."
            if (inner := next(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), None)) is not None:
                advice = f"There are checkpoints in it: give one of these, such as {inner}."
            lack = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
            if not any(folder.iterdir()):
                lack, advice = "the folder is empty", "Give the path of a checkpoint-<step> folder."
            raise ValueError(
                f"Can't find a valid checkpoint at {folder}: {lack}, so it cannot be resumed exactly. {advice}"
            )
        inspection.refuse_damage(
            "Resume from another checkpoint, or give resume_from_checkpoint=True to take the newest intact one."
        )
        if inspection.manifest.weights_are_finite is False:
            advice = "Training does not repair them; resume_from_checkpoint=True takes the newest finite checkpoint."
            logger.warning("Weights or optimizer states in %s are not finite. %s", folder, advice)
        if (remote := get_store(folder.parent).remote) is not None:
            # Rotation keeps an earlier training's checkpoints at the URL until this training resumes from any of them.
            remote.on_resume(folder.name)
        return folder

    # ---- Background save ---------------------------------------------------------------------------------------------

    def can_save_async(self, storage: FullStateIO) -> bool:
        """Return whether a save can run in the background; warn if the model does not support `async_save`."""
        if self.is_async and not storage.supports_async_save and not self._has_warned_of_fsdp1:
            logger.warning(
                "async_save: models sharded by version 1 of FSDP cannot be saved in the background, so training waits "
                "for checkpoints. Leave fsdp_config['version'] at 2."
            )
            self._has_warned_of_fsdp1 = True
        return self.is_async and storage.supports_async_save

    def wait(self) -> None:
        """Wait for the pending save, and raise its error or call its `when_complete`."""
        if (save := self.pending) is not None:
            self._end_pending(save)
            with part_of_training(SAVE):
                with raise_on_all_ranks(f"writing {save.folder}"):
                    if (error := save.writing.exception()) is not None:
                        raise BackgroundSaveError(save.failure()) from error
                save.when_complete(str(save.folder), save.state)

    def close(self) -> None:
        """Wait for the pending save at a training's end; log its error, which must not hide the training's error."""
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


def _resume_records(request: SaveRequest) -> dict[str, Any]:
    """Return the contents of the resume files that this process writes, by file name.

    A process with `should_save` writes the whole record; each rank above 0 also writes a file with its own `data`.
    """
    if request.resume_record is None:
        return {}
    rank, record = request.args.process_index, request.resume_record()
    files = {resume_record_name(rank): {name: record[name] for name in ("version", "data")}} if rank else {}
    return {**files, RESUME_RECORD_NAME: record} if request.args.should_save else files


def _export_callback_states(request: SaveRequest) -> None:
    states = request.state.stateful_callbacks
    for name, now in export_states(list(filter(is_exportable, request.callbacks))).items():
        # As in transformers, several callbacks of a class share a list, to which each save appends their states.
        before = states.get(name)
        states[name] = [*before, *(now if isinstance(now, list) else [now])] if isinstance(before, list) else now


# ---- Resumes of a restarted script -----------------------------------------------------------------------------------


def find_restart_checkpoint(resume_from_checkpoint: str | bool | None, output_dir: str) -> str | bool | None:
    """Return the checkpoint from which a restarted script continues, or else `resume_from_checkpoint`.

    The checkpoint is the intact one with the highest step written since `littrainer run` first started the script.
    Trainings are recognized by their number in the script, so all processes call this once for each training.
    """
    if get_reports_folder() is None or TRAININGS not in os.environ:
        return resume_from_checkpoint
    number = str(next(_trainings))
    with raise_on_all_ranks("looking for the checkpoint to continue from"):
        if rank() == 0:
            file = Path(os.environ[TRAININGS])
            trainings = json.loads(file.read_text("utf-8")) if file.is_file() else {}
            folders: dict[str, dict[str, list[int]]] = trainings.setdefault(number, {})
            # Each start may have had another output_dir; the latest is searched first.
            for folder, before in reversed(folders.items()):
                now = identify_checkpoints(folder)
                earlier = {name for name in before if now.get(name) == before[name]}
                newest = find_last_intact(folder, earlier) if now else None
                if newest is not None:
                    logger.warning("Restarted, and resumes from the checkpoint %s.", newest)
                    resume_from_checkpoint = newest
                    break
            folders.setdefault(os.path.abspath(output_dir), identify_checkpoints(output_dir))
            write_atomically(file, json.dumps(trainings))
    return broadcast_object(resume_from_checkpoint)


def identify_checkpoints(folder: str | Path) -> dict[str, list[int]]:
    """Return numbers by checkpoint name that change if the checkpoint is rewritten.

    The numbers are the manifest's CRC-32, or without a manifest the folder's inode and time.
    """
    identities = {path: [*_identity(path)] for path in Path(folder).glob("*") if checkpoint_step(path) is not None}
    for path in identities:
        with contextlib.suppress(OSError):
            identities[path] = [zlib.crc32((path / MANIFEST_NAME).read_bytes())]
    return {path.name: identity for path, identity in identities.items()}


def _identity(folder: Path) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_ino, status.st_mtime_ns


def _find_problem(folder: Path, identity: tuple[int, int], args: TrainingArguments) -> str | None:
    if not folder.is_dir():
        return f"{socket.gethostname()} {NO_SUCH_FOLDER}."
    # The first process of each node checks the node's disk, unless inode and time show that it is rank 0's disk, which
    # rank 0 has checked.
    if args.local_process_index != 0 or _identity(folder) == identity:
        return None
    damage = find_damage(folder)
    return f"{socket.gethostname()}: {' '.join(damage)}" if damage else None
