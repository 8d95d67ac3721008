"""Pushes of the model: at each save according to `hub_strategy`, at the end of training, and by the script.

A push uploads a snapshot of the files, since training continues to modify output_dir. The Hub's client uploads in a
thread, in the order of the pushes.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import shutil
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.arguments.choices import HubStrategy, SaveStrategy
from littrainer.callbacks.state import TrainerState
from littrainer.callbacks.trainer_context import TrainerContext
from littrainer.checkpoint.atomic_write import remove_if_empty
from littrainer.checkpoint.checksums import MANIFEST_NAME
from littrainer.checkpoint.layout import (
    LAST_CHECKPOINT,
    LIGHTNING_STATE_NAME,
    OPTIMIZER_NAME,
    OPTIMIZER_SHARDS,
    PREFIX_CHECKPOINT_DIR,
    RUN_RECORD_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    STACKS_NAME,
    TRAINER_STATE_NAME,
    WEIGHT_SHARDS,
    checkpoint_step,
)
from littrainer.checkpoint.store import get_store, is_abandoned, lock_folder
from littrainer.hub.model_card import remove_generated_card
from littrainer.hub.repository import (
    CARD_NAME,
    advise,
    choose_token,
    describe_error,
    explain_errors,
    make_branch,
    remove_files_with_tokens,
    repository_name,
)

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


logger = logging.getLogger(__name__)

CHECKPOINT_STRATEGIES = (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)
END_OF_TRAINING = "End of training"
NEXT_SAVE_HINT = "Training continues; the next save is pushed again."
SAVED_LOCALLY_HINT = "The last save is in output_dir: push_to_hub() pushes the model, and `hf upload` a checkpoint."
MESSAGE_INTERVAL_S = 30.0
# In output_dir, so that checkpoints are on the same file system.
SNAPSHOT_DIR = ".littrainer_push"
# Not part of the model, of another push, or incomplete.
EXCLUDED_FILES = (
    *("_*", f"{PREFIX_CHECKPOINT_DIR}-*", f"*/{PREFIX_CHECKPOINT_DIR}-*/*", f"{LAST_CHECKPOINT}/*"),
    *(".littrainer_*", "*/.littrainer_*", RUN_RECORD_NAME, f"*/{RUN_RECORD_NAME}", STACKS_NAME),
    *("*.unfinished", "*.unfinished-*", "*.incomplete", "*.lock", "*.tmp", "*~", "*.swp", "*__pycache__/*"),
    *(".unfinished/*", "*/.unfinished/*", ".git/*", "*/.git/*", ".cache/*", "*/.cache/*"),
)
# The card here is PEFT's, in addition to output_dir's.
RESUME_ONLY_FILES = (
    *(CARD_NAME, OPTIMIZER_NAME, *OPTIMIZER_SHARDS, *WEIGHT_SHARDS, SCHEDULER_NAME, SCALER_NAME, TRAINER_STATE_NAME),
    *("rng_state*.pth", "littrainer_resume*.pt", LIGHTNING_STATE_NAME, MANIFEST_NAME, "latest", "zero_to_fp32.py"),
)
# Smaller files may be modified in place, and are copied.
MAX_COPIED_BYTES = 16 << 20


# ---- A push of each save ---------------------------------------------------------------------------------------------


def push_save(trainer: TrainerContext, checkpoint: str) -> Any:
    """Start to push a checkpoint according to `hub_strategy`, and return the Trainer's pushes.

    The checkpoint is skipped if an earlier push is running, unless `hub_always_push` is set.
    """
    args, earlier = trainer.args, trainer.session.hub.pushes
    if not trainer.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
        return earlier
    if earlier is not None and not earlier.is_done() and not args.hub_always_push:
        logger.info("%s is not pushed: the previous push is still running (hub_always_push).", checkpoint)
        return earlier
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    pushes = get_pushes(args, earlier)
    message = _message_of_save(args, trainer.state, Path(checkpoint))
    try:
        if trainer.hub_model_id is None:
            trainer.init_hf_repo()
        uploads = _snapshot_checkpoint(args, str(trainer.hub_model_id), Path(checkpoint), message)
    except Exception as error:
        # A full disk must not end a training that can continue.
        failure = f'Preparing the push "{message}" failed ({describe_error(error, choose_token(args))}).'
        pushes.begin([], failure)
    else:
        pushes.begin(uploads)
    return pushes


def get_pushes(args: TrainingArguments, pushes: Any) -> PushInProgress:
    """Return the pushes of a Trainer; before the first, remove the files of killed programs."""
    if isinstance(pushes, PushInProgress):
        return pushes
    remove_abandoned_snapshots(Path(args.output_dir))
    return PushInProgress()


def _snapshot_checkpoint(args: TrainingArguments, repository: str, checkpoint: Path, message: str) -> list[Upload]:
    output_dir = Path(args.output_dir)
    with create_snapshot(output_dir, checkpoint.name) as folder:
        copy_files(checkpoint, folder / "model", RESUME_ONLY_FILES)
        if args.hub_strategy in CHECKPOINT_STRATEGIES:
            copy_files(checkpoint, folder / "checkpoint")
    token, revision = choose_token(args), args.hub_revision
    uploads = [Upload(repository, folder / "model", message, token, revision, further_files=output_dir.resolve())]
    if args.hub_strategy in CHECKPOINT_STRATEGIES:
        path = LAST_CHECKPOINT if args.hub_strategy == HubStrategy.CHECKPOINT else checkpoint.name
        uploads.append(Upload(repository, folder / "checkpoint", f"{message}, checkpoint", token, revision, path))
    return uploads


def _message_of_save(args: TrainingArguments, state: TrainerState, checkpoint: Path) -> str:
    step = checkpoint_step(checkpoint)
    if args.save_strategy == SaveStrategy.STEPS:
        return f"Training in progress, step {state.global_step if step is None else step}"
    state_file = checkpoint / TRAINER_STATE_NAME
    if step not in (None, state.global_step) and state_file.is_file():
        # The checkpoint was written in the background.
        state = TrainerState.load_from_json(str(state_file))
    return f"Training in progress, epoch {int(state.epoch or 0)}"


# ---- The end of a training -------------------------------------------------------------------------------------------


def finish_pushes(pushes: Any) -> None:
    """Wait for running pushes, and retry a failed push once."""
    if isinstance(pushes, PushInProgress):
        pushes.finish()
    elif pushes is not None:
        # Transformers' PushInProgress, set by a subclass.
        pushes.wait_until_done()


@contextlib.contextmanager
def report_pushes_on_error(pushes: Callable[[], Any]) -> Iterator[None]:
    """Log running pushes if the block fails."""
    try:
        yield
    except BaseException:
        if isinstance(running := pushes(), PushInProgress):
            running.continue_after_error()
        raise


# ---- A push by the script --------------------------------------------------------------------------------------------


def push_model(
    trainer: TrainerContext,
    finish_earlier: Callable[[], PushInProgress],
    commit_message: str | None,
    blocking: bool,
    token: str | None,
    revision: str | None,
    private: bool | None,
    **card: Any,
) -> Any:
    """Save the model to `output_dir`, write its card and push both; all processes call this, and the first pushes.

    Parameters:
        finish_earlier: waits for running pushes, and returns the Trainer's pushes.
        card: keywords of `create_model_card`.

    Returns:
        the commit, or its Future if not `blocking`; None in the other processes.
    """
    args = trainer.args
    card.setdefault("model_name", repository_name(args).rpartition("/")[2])
    model_tags = getattr(trainer.model, "model_tags", None)
    if model_tags is not None:
        tags = card.get("tags")
        card["tags"] = list(dict.fromkeys([*([tags] if isinstance(tags, str) else tags or []), *model_tags]))
    # Fail in all processes, and before any work.
    inspect.signature(trainer.create_model_card).bind(**card)
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    token = choose_token(args, token)
    if trainer.hub_model_id is None:
        trainer.init_hf_repo(token=token, private=private)
    trainer.save_model(_internal_call=True)
    if not trainer.is_world_process_zero():
        return None
    trainer.create_model_card(**card)
    # This push replaces a failed push.
    pushes = finish_earlier()
    output_dir = Path(args.output_dir)
    with create_snapshot(output_dir, "by-hand") as folder:
        # The script may save or train again during a push in the background.
        copy_files(output_dir, folder / "model", EXCLUDED_FILES, link=os.symlink if blocking else None)
        remove_files_with_tokens(folder / "model", args.hub_token)
    branch = args.hub_revision if revision is None else revision
    upload = Upload(str(trainer.hub_model_id), folder / "model", commit_message, token, branch)
    return pushes.push_by_script(upload, blocking)


# ---- Uploads in the background ---------------------------------------------------------------------------------------


@dataclass
class Upload:
    """A commit to make.

    Parameters:
        message: None is the Hub's default.
        revision: the branch; None is the main branch.
        path_in_repo: target folder, whose other files the commit deletes; None is the root.
        further_files: folder whose files the upload thread adds.
    """

    repository: str
    folder: Path
    message: str | None
    token: str | None = field(default=None, repr=False)
    revision: str | None = None
    path_in_repo: str | None = None
    further_files: Path | None = None

    def __str__(self) -> str:
        return f'"{self.message}" to {self.repository}'

    def send(self) -> Any:
        """Create the branch and the commit, which does not replace a card edited on the Hub."""
        from huggingface_hub import HfApi

        if self.further_files is not None:
            copy_files(self.further_files, self.folder, EXCLUDED_FILES, link=None)
        make_branch(self.repository, self.revision, self.token)
        if self.path_in_repo is None:
            remove_generated_card(self.folder, self.repository, self.revision, self.token)
        remove_files_with_tokens(self.folder, self.token)
        return HfApi().upload_folder(
            repo_id=self.repository,
            folder_path=self.folder,
            path_in_repo=self.path_in_repo,
            commit_message=self.message,
            token=self.token,
            revision=self.revision,
            delete_patterns=None if self.path_in_repo is None else "*",
        )


class PushInProgress:
    """The pushes of a Trainer, which the Hub's client uploads in sequence in the background."""

    def __init__(self) -> None:
        # Running and waiting pushes, and the last push.
        self.jobs: list[Future[Any]] = []
        # The failure of the last push at the end of training.
        self.failure_at_end: str | None = None
        self._process = os.getpid()
        # The single thread of the client runs the jobs in order.
        self._client: Any = None
        # Uploads of the last failed push.
        self._unsent: list[Upload] = []
        self._failure: str | None = None
        # None if the end of the training reports the failure.
        self._consequence: str | None = NEXT_SAVE_HINT
        self._current: Upload | None = None
        weakref.finalize(self, _remove_snapshots_of_process, self._unsent, self._process)

    def __reduce__(self) -> Any:
        # A copy has no thread.
        return (type(self), ())

    def is_done(self) -> bool:
        return all(job.done() for job in self.jobs)

    def wait_until_done(self, seconds: float | None = None) -> bool:
        return not wait(self.jobs, seconds).not_done

    def cancel(self) -> None:
        self.jobs = [job for job in self.jobs if not (job.cancel() or job.done())]

    def begin(self, uploads: list[Upload], failure: str | None = None) -> None:
        """Send the uploads of a push in the background; `failure` is the reason for an empty list."""
        self._consequence = NEXT_SAVE_HINT
        self._submit(self._send, uploads, failure)

    def push_by_script(self, upload: Upload, blocking: bool) -> Any:
        """Send an upload of the script, while no push is running."""
        if blocking:
            return self._send_by_script([upload], is_waited_for=True)
        return self._submit(self._send_by_script, [upload], False)

    def finish(self) -> None:
        """Wait for the pushes, and retry the last failed push once."""
        self._consequence = None
        self._wait()
        if self._failure is not None and self._unsent:
            logger.warning("The last push to the Hub has failed and is retried once.")
            self._submit(self._send, list(self._unsent), None)
            self._wait()
        self.failure_at_end, self._failure, self._consequence = self._failure, None, NEXT_SAVE_HINT
        if self.failure_at_end is not None:
            self._end_push([], [])
            logger.warning("%s %s", self.failure_at_end, SAVED_LOCALLY_HINT)

    def continue_after_error(self) -> None:
        """Log the pushes that continue after a failed training, or the last failure."""
        self._consequence = SAVED_LOCALLY_HINT
        if self.is_running():
            logger.warning("%s, and continues though training has ended.", self._description())
        elif self._failure is not None:
            logger.error("%s %s", self._failure, SAVED_LOCALLY_HINT)

    def is_running(self) -> bool:
        """Return whether a push is running; a fork has no thread."""
        return self._process == os.getpid() and not self.is_done()

    def finish_before_exit(self) -> None:
        """Wait for running pushes at the end of the program, until Ctrl-C."""
        description = self._description()
        try:
            logger.warning("%s. The program ends when that is done; Ctrl-C ends it at once.", description)
            self.wait_until_done()
        except KeyboardInterrupt:
            self.cancel()
            logger.error("%s, and the program ends without it.", description)
            # The exit functions of Python's pools would wait again, and report this with a traceback.
            sys.unraisablehook = lambda unraisable: None
            raise

    def _submit(self, work: Callable[..., Any], uploads: list[Upload], *further: Any) -> Future[Any]:
        if self._client is None:
            from huggingface_hub import HfApi

            self._client = HfApi()
            _register_exit_function(self)
        self._current = self._current or next(iter(uploads), None)
        job: Future[Any] = self._client.run_as_future(work, uploads, *further)
        job.add_done_callback(lambda job: remove_snapshots(*_folders_of(uploads)) if job.cancelled() else None)
        self.jobs = [*(earlier for earlier in self.jobs if not earlier.done()), job]
        return job

    def _wait(self) -> None:
        start = time.monotonic()
        while not self.wait_until_done(MESSAGE_INTERVAL_S):
            logger.warning("%s, and is waited for, %.0f s so far.", self._description(), time.monotonic() - start)

    def _description(self) -> str:
        return f"{'A push to the Hub' if self._current is None else f'The push of {self._current}'} is running"

    def _send(self, uploads: list[Upload], failure: str | None) -> None:
        unsent, self._failure = uploads, failure
        try:
            for index, upload in enumerate(uploads):
                self._current, unsent = upload, uploads[index:]
                upload.send()
            unsent = []
        except Exception as error:
            # Later uploads would most likely fail too.
            failed = unsent[0]
            self._failure = f"Pushing {failed} failed ({describe_error(error, failed.token)}). {advise(error)}".rstrip()
        self._end_push(uploads, unsent)
        if self._failure is not None and self._consequence is not None:
            logger.warning("%s %s", self._failure, self._consequence)

    def _send_by_script(self, uploads: list[Upload], is_waited_for: bool) -> Any:
        (upload,) = uploads
        try:
            with explain_errors(f"pushing to {upload.repository}", upload.token):
                return upload.send()
        except Exception as error:
            if not is_waited_for:
                logger.warning("Pushing to %s failed (%s).", upload.repository, describe_error(error, upload.token))
            raise
        finally:
            self._end_push(uploads, self._unsent)

    def _end_push(self, uploads: list[Upload], unsent: list[Upload]) -> None:
        """Record unsent uploads, and remove the files of others."""
        folders = _folders_of([*self._unsent, *uploads]) - _folders_of(unsent)
        self._current = None
        self._unsent[:] = unsent
        remove_snapshots(*folders)


def _folders_of(uploads: list[Upload]) -> set[Path]:
    return {upload.folder.parent for upload in uploads}


def _remove_snapshots_of_process(uploads: list[Upload], process: int) -> None:
    # A fork does not own them.
    if os.getpid() == process:
        remove_snapshots(*_folders_of(uploads))


def _register_exit_function(pushes: PushInProgress) -> None:
    """Wait for pushes before the exit functions of Python's pools, which were registered earlier and admit no work."""
    reference = weakref.ref(pushes)

    def finish() -> None:
        remaining = reference()
        if remaining is not None and remaining.is_running():
            remaining.finish_before_exit()

    register: Any = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(finish)


# ---- Files of a push -------------------------------------------------------------------------------------------------


def copy_files(
    source: Path,
    target: Path,
    excluded: Collection[str] = (),
    link: Callable[[Path, Path], None] | None = os.link,
) -> None:
    """Copy the files of a checkpoint or of output_dir that the target folder lacks.

    Parameters:
        link: links a large file that is not modified during the push; None copies.
    """
    target.mkdir(parents=True, exist_ok=True)
    for parent, folders, names in os.walk(source):
        # A checkpoint of a `lightning.Trainer` may have any name.
        copied = (name for name in folders if not Path(parent, name, LIGHTNING_STATE_NAME).is_file())
        folders[:] = sorted(name for name in copied if name != SNAPSHOT_DIR)
        for path in (Path(parent, name) for name in sorted(names)):
            name = path.relative_to(source).as_posix()
            is_excluded = any(fnmatch(name, pattern) for pattern in excluded)
            if path.is_file() and not is_excluded and not (target / name).exists():
                # A callback may delete the file.
                with contextlib.suppress(FileNotFoundError):
                    _copy_file(path, target / name, link)


def _copy_file(source: Path, target: Path, link: Callable[[Path, Path], None] | None) -> None:
    size = source.stat().st_size
    target.parent.mkdir(parents=True, exist_ok=True)
    if link is not None and size > MAX_COPIED_BYTES:
        with contextlib.suppress(OSError):
            # Link to the file itself, since an intermediate link may be deleted.
            link(source.resolve(), target)
            return
    shutil.copyfile(source, target)


@contextlib.contextmanager
def create_snapshot(output_dir: Path, name: str) -> Iterator[Path]:
    """Create and lock the folder of a push, and remove it if the block fails."""
    # The script may change its working directory before the push ends.
    folder = output_dir.resolve() / SNAPSHOT_DIR / f"{name}-{uuid.uuid4().hex[:8]}"
    lock_folder(folder)
    try:
        yield folder
    except BaseException:
        remove_snapshots(folder)
        raise


def remove_abandoned_snapshots(output_dir: Path) -> None:
    for folder in sorted((output_dir / SNAPSHOT_DIR).glob("*")):
        # Without locks in the file system the owner is unknown.
        if is_abandoned(folder):
            remove_snapshots(folder)


def remove_snapshots(*folders: Path) -> None:
    for folder in folders:
        get_store(folder).close()
        shutil.rmtree(folder, ignore_errors=True)
        remove_if_empty(folder.parent)
