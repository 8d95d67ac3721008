"""Pushing the model: at each save as `hub_strategy` asks for it, when training ends, and when a script asks for it.

A push sends the files as they are at that step, from a folder that is set aside, since training continues to delete
checkpoints and to write into output_dir. The Hub's client sends in a thread, one push after the other.
"""

from __future__ import annotations

import contextlib
import functools
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
from littrainer.checkpoint.atomic_write import remove_if_empty
from littrainer.checkpoint.checksums import MANIFEST_NAME
from littrainer.checkpoint.distributed_resume import LAST_CHECKPOINT
from littrainer.checkpoint.layout import (
    LIGHTNING_STATE_NAME,
    OPTIMIZER_NAME,
    OPTIMIZER_PARTS,
    PREFIX_CHECKPOINT_DIR,
    RUN_RECORD_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    STACKS_NAME,
    TRAINER_STATE_NAME,
    WEIGHT_PARTS,
    checkpoint_step,
)
from littrainer.checkpoint.store import is_abandoned, lock_folder, store_of
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

# The strategies that push checkpoints as well as the model.
CHECKPOINT_STRATEGIES = (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)
# Commit message of a push by the script that names none.
END_OF_TRAINING = "End of training"
# Consequences of a failed push, in messages.
NEXT_SAVE_HINT = "Training continues; the next save is pushed again."
SAVED_LOCALLY_HINT = (
    "What was saved last is in output_dir: push_to_hub() pushes the model, and `hf upload` a checkpoint."
)
MESSAGE_INTERVAL_S = 30.0
# Next to the checkpoints, on the same file system.
SNAPSHOT_DIR = ".littrainer_push"
# Files in output_dir that are no part of the model, belong to another push, or are being written.
EXCLUDED_FILES = (
    *("_*", f"{PREFIX_CHECKPOINT_DIR}-*", f"*/{PREFIX_CHECKPOINT_DIR}-*/*", f"{LAST_CHECKPOINT}/*"),
    *(".littrainer_*", "*/.littrainer_*", RUN_RECORD_NAME, f"*/{RUN_RECORD_NAME}", STACKS_NAME),
    *("*.unfinished", "*.unfinished-*", "*.incomplete", "*.lock", "*.tmp", "*~", "*.swp", "*__pycache__/*"),
    *(".unfinished/*", "*/.unfinished/*", ".git/*", "*/.git/*", ".cache/*", "*/.cache/*"),
)
# Files of a checkpoint that only a resume needs, and the card that PEFT writes into each, though output_dir has one.
RESUME_ONLY_FILES = (
    *(CARD_NAME, OPTIMIZER_NAME, *OPTIMIZER_PARTS, *WEIGHT_PARTS, SCHEDULER_NAME, SCALER_NAME, TRAINER_STATE_NAME),
    *("rng_state*.pth", "littrainer_resume*.pt", LIGHTNING_STATE_NAME, MANIFEST_NAME, "latest", "zero_to_fp32.py"),
)
# Bytes up to which a file is copied, for it may be written into in place; beyond it a link has to do.
MAX_COPIED_BYTES = 16 << 20


# ---- A push of each save ---------------------------------------------------------------------------------------------


def push_save(trainer: Any, checkpoint: str) -> Any:
    """Begin to push a checkpoint that was just written, as `hub_strategy` asks for it.

    While an earlier push is running it is left out, unless `hub_always_push` is set.

    Returns:
        the pushes of the Trainer from now on.
    """
    args, earlier = trainer.args, trainer.push_in_progress
    if not trainer.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
        return earlier
    if earlier is not None and not earlier.is_done() and not args.hub_always_push:
        logger.info("%s is left out: the push before it is still on its way (hub_always_push).", checkpoint)
        return earlier
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    pushes = get_pushes(args, earlier)
    message = _message_of_save(args, trainer.state, Path(checkpoint))
    try:
        if trainer.hub_model_id is None:
            trainer.init_hf_repo()
        uploads = _snapshot_checkpoint(args, trainer.hub_model_id, Path(checkpoint), message)
    except Exception as error:
        # A full disk must not end a training that can go on.
        failure = f'Preparing the push "{message}" failed ({describe_error(error, choose_token(args))}).'
        pushes.begin([], failure)
    else:
        pushes.begin(uploads)
    return pushes


def get_pushes(args: TrainingArguments, pushes: Any) -> PushInProgress:
    """Return the pushes of a Trainer; before the first push, the files of killed programs are removed."""
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
    written = checkpoint / TRAINER_STATE_NAME
    if step not in (None, state.global_step) and written.is_file():
        # The checkpoint was written in the background, while training went on.
        state = TrainerState.load_from_json(str(written))
    return f"Training in progress, epoch {int(state.epoch or 0)}"


# ---- The end of a training -------------------------------------------------------------------------------------------


def finish_pushes(pushes: Any) -> None:
    """Wait for what is on its way, and try once more what failed; what fails again is a warning."""
    if isinstance(pushes, PushInProgress):
        pushes.finish()
    elif pushes is not None:
        # A subclass has put one of transformers' there.
        pushes.wait_until_done()


@contextlib.contextmanager
def report_pushes_on_error(pushes: Callable[[], Any]) -> Iterator[None]:
    """Train in the block; if it ends by an error, a line names the pushes that are on their way."""
    try:
        yield
    except BaseException:
        if isinstance(on_their_way := pushes(), PushInProgress):
            on_their_way.continue_after_error()
        raise


# ---- A push by the script --------------------------------------------------------------------------------------------


def push_model(
    trainer: Any,
    finish_earlier: Callable[[], PushInProgress],
    commit_message: str | None,
    blocking: bool,
    token: str | None,
    revision: str | None,
    private: bool | None,
    **card: Any,
) -> Any:
    """Save the model to `output_dir`, write its card and push both; all processes call this, the first one pushes.

    Parameters:
        finish_earlier: waits for running pushes, and returns what sends this push.
        card: keywords of `create_model_card`.

    Returns:
        what the Hub's client says of the commit, or a Future of it if `blocking` is False; None in the other processes.

    Raises:
        TypeError: `create_model_card` takes no such keyword.
    """
    args = trainer.args
    card.setdefault("model_name", repository_name(args).rpartition("/")[2])
    model_tags = getattr(trainer.model, "model_tags", None)
    if model_tags is not None:
        tags = card.get("tags")
        card["tags"] = list(dict.fromkeys([*([tags] if isinstance(tags, str) else tags or []), *model_tags]))
    # In all processes, and before anything is done.
    inspect.signature(trainer.create_model_card).bind(**card)
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    token = choose_token(args, token)
    if trainer.hub_model_id is None:
        trainer.init_hf_repo(token=token, private=private)
    trainer.save_model(_internal_call=True)
    if not trainer.is_world_process_zero():
        return None
    trainer.create_model_card(**card)
    # If that fails, this push replaces it.
    pushes = finish_earlier()
    output_dir = Path(args.output_dir)
    with create_snapshot(output_dir, "by-hand") as folder:
        # The script may save or train again before the files are sent in the background.
        copy_files(output_dir, folder / "model", EXCLUDED_FILES, link=os.symlink if blocking else None)
        remove_files_with_tokens(folder / "model", args.hub_token)
    branch = args.hub_revision if revision is None else revision
    upload = Upload(str(trainer.hub_model_id), folder / "model", commit_message, token, branch)
    return pushes.push_by_script(upload, blocking)


# ---- Uploads in the background ---------------------------------------------------------------------------------------


@dataclass
class Upload:
    """Commit that is to be made.

    Parameters:
        message: of the commit; None is the Hub's default.
        token: to sign in with; in no text of this object.
        revision: the branch; None is the main one.
        path_in_repo: folder there, whose other files are deleted in the same commit; None is the root.
        further_files: folder whose other files are copied before they are sent, by the thread that sends.
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
        """Make the commit, and before it the branch, unless it exists; a card that was edited on the Hub stays."""
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
    """Pushes of a Trainer, which the Hub's client sends one at a time in the background.

    Attributes:
        jobs: the Futures of pushes that have not ended yet, and of those that ended last.
        failure_at_end: what the Hub lacks, and why, when pushes were last waited for; None if it lacks nothing.
    """

    def __init__(self) -> None:
        self.jobs: list[Future[Any]] = []
        self.failure_at_end: str | None = None
        self._process = os.getpid()
        # Its one thread takes the jobs in their order.
        self._client: Any = None
        # Uploads of the push that failed last, which a newer push replaces.
        self._unsent: list[Upload] = []
        self._failure: str | None = None
        # The consequence that a failure's warning names; None if the end of the training reports it.
        self._consequence: str | None = NEXT_SAVE_HINT
        self._current: Upload | None = None
        weakref.finalize(self, _remove_snapshots_of_process, self._unsent, self._process)

    def __reduce__(self) -> Any:
        # A copy, also in another process, has no thread.
        return (type(self), ())

    def is_done(self) -> bool:
        """Return whether no push is running or waiting."""
        return all(job.done() for job in self.jobs)

    def wait_until_done(self, seconds: float | None = None) -> bool:
        """Return when no push is running, or after so many seconds; whether none is running."""
        return not wait(self.jobs, seconds).not_done

    def cancel(self) -> None:
        """Drop pushes that have not begun; a push that has begun continues."""
        self.jobs = [job for job in self.jobs if not (job.cancel() or job.done())]

    def begin(self, uploads: list[Upload], failure: str | None = None) -> None:
        """Send the uploads of a push in the background, after the pushes that are running.

        Parameters:
            failure: the reason why there are none.
        """
        self._consequence = NEXT_SAVE_HINT
        self._submit(self._send, uploads, failure)

    def push_by_script(self, upload: Upload, blocking: bool) -> Any:
        """Send an upload of the script, while no push is running.

        Returns:
            what the Hub's client says of the commit, or a Future of it if `blocking` is False.
        """
        if blocking:
            return self._send_by_script([upload], is_waited_for=True)
        return self._submit(self._send_by_script, [upload], False)

    def finish(self) -> None:
        """Wait for the pushes, and retry once those that failed last; a second failure is a warning."""
        self._consequence = None
        self._wait()
        if self._failure is not None and self._unsent:
            logger.warning("The last push to the Hub had failed and is tried once more.")
            self._submit(self._send, list(self._unsent), None)
            self._wait()
        self.failure_at_end, self._failure, self._consequence = self._failure, None, NEXT_SAVE_HINT
        if self.failure_at_end is not None:
            self._end_push([], [])
            logger.warning("%s %s", self.failure_at_end, SAVED_LOCALLY_HINT)

    def continue_after_error(self) -> None:
        """Report, when an error has ended training, the pushes that continue, or the last failure."""
        self._consequence = SAVED_LOCALLY_HINT
        if self.is_running():
            logger.warning("%s, and goes on though training has ended.", self._description())
        elif self._failure is not None:
            logger.error("%s %s", self._failure, SAVED_LOCALLY_HINT)

    def is_running(self) -> bool:
        """Return whether a push is running in this process; in a fork of it there is no thread."""
        return self._process == os.getpid() and not self.is_done()

    def finish_before_exit(self) -> None:
        """Wait for running pushes when the program ends, until an interruption."""
        description = self._description()
        try:
            logger.warning("%s. The program ends when that is done; Ctrl-C ends it at once.", description)
            self.wait_until_done()
        except KeyboardInterrupt:
            self.cancel()
            logger.error("%s, and the program ends without it.", description)
            # The exit functions of Python's pools, which come next, would wait for the thread again. Python reports the
            # interruption of its end as an error that it ignores, with a traceback.
            sys.unraisablehook = lambda unraisable: None
            raise

    def _submit(self, work: Callable[..., Any], uploads: list[Upload], *further: Any) -> Future[Any]:
        if self._client is None:
            from huggingface_hub import HfApi

            self._client = HfApi()
        self._current = self._current or next(iter(uploads), None)
        job: Future[Any] = self._client.run_as_future(work, uploads, *further)
        job.add_done_callback(lambda job: remove_snapshots(*_folders_of(uploads)) if job.cancelled() else None)
        self.jobs = [*(earlier for earlier in self.jobs if not earlier.done()), job]
        _active_pushes.add(self)
        _register_exit_function()
        return job

    def _wait(self) -> None:
        start = time.monotonic()
        while not self.wait_until_done(MESSAGE_INTERVAL_S):
            logger.warning("%s, and is waited for, %.0f s so far.", self._description(), time.monotonic() - start)

    def _description(self) -> str:
        return f"{'A push to the Hub' if self._current is None else f'The push of {self._current}'} is on its way"

    def _send(self, uploads: list[Upload], failure: str | None) -> None:
        unsent, self._failure = uploads, failure
        try:
            for place, upload in enumerate(uploads):
                self._current, unsent = upload, uploads[place:]
                upload.send()
            unsent = []
        except Exception as error:
            # The uploads after it would most likely fail as well, and delay the next save.
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
        """Note what was not sent of a push, and remove the files of all other uploads."""
        folders = _folders_of([*self._unsent, *uploads]) - _folders_of(unsent)
        self._current, self._unsent[:] = None, unsent
        remove_snapshots(*folders)


def _folders_of(uploads: list[Upload]) -> set[Path]:
    return {upload.folder.parent for upload in uploads}


def _remove_snapshots_of_process(uploads: list[Upload], process: int) -> None:
    # In a fork they still belong to the first process.
    if os.getpid() == process:
        remove_snapshots(*_folders_of(uploads))


_active_pushes: weakref.WeakSet[PushInProgress] = weakref.WeakSet()


@functools.cache
def _register_exit_function() -> None:
    # Python's pools, which the Hub's client uploads with, accept no work once the program ends. The function is called
    # before theirs because it is registered later, after a pool was made.
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(_finish_before_exit)


def _finish_before_exit() -> None:
    for pushes in list(_active_pushes):
        if pushes.is_running():
            pushes.finish_before_exit()


# ---- Files of a push -------------------------------------------------------------------------------------------------


def copy_files(
    source: Path,
    target: Path,
    left_out: Collection[str] = (),
    link: Callable[[Path, Path], None] | None = os.link,
) -> None:
    """Copy the files of a checkpoint or of output_dir that are not in a folder yet.

    Parameters:
        left_out: patterns of names.
        link: links a large file, which takes no time and no space, if nothing writes into it while it is sent, as for a
            complete checkpoint; None copies it.
    """
    target.mkdir(parents=True, exist_ok=True)
    for parent, folders, names in os.walk(source):
        # A folder with Lightning's state is a checkpoint of a `lightning.Trainer`, whose name is up to its user.
        others = (name for name in folders if not Path(parent, name, LIGHTNING_STATE_NAME).is_file())
        folders[:] = sorted(name for name in others if name != SNAPSHOT_DIR)
        for path in (Path(parent, name) for name in sorted(names)):
            name = path.relative_to(source).as_posix()
            if (
                path.is_file()
                and not (target / name).exists()
                and not any(fnmatch(name, pattern) for pattern in left_out)
            ):
                # A callback may delete a file meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    _copy_file(path, target / name, link)


def _copy_file(source: Path, target: Path, link: Callable[[Path, Path], None] | None) -> None:
    size = source.stat().st_size
    target.parent.mkdir(parents=True, exist_ok=True)
    if link is not None and size > MAX_COPIED_BYTES:
        with contextlib.suppress(OSError):
            # A link to a link would end where that is deleted.
            link(source.resolve(), target)
            return
    shutil.copyfile(source, target)


@contextlib.contextmanager
def create_snapshot(output_dir: Path, name: str) -> Iterator[Path]:
    """Run a block that fills the folder of a push, which is removed again if that fails, as on a full disk.

    Other runs in output_dir leave the folder alone as long as this process lives.
    """
    # The script may change its working directory before the push ends.
    folder = output_dir.resolve() / SNAPSHOT_DIR / f"{name}-{uuid.uuid4().hex[:8]}"
    lock_folder(folder)
    try:
        yield folder
    except BaseException:
        remove_snapshots(folder)
        raise


def remove_abandoned_snapshots(output_dir: Path) -> None:
    """Remove what runs that were killed left of their pushes, and nothing of a run that is alive."""
    for folder in sorted((output_dir / SNAPSHOT_DIR).glob("*")):
        # On a file system without locks it is not known whose the folder is, so that it stays.
        if is_abandoned(folder):
            remove_snapshots(folder)


def remove_snapshots(*folders: Path) -> None:
    """Remove snapshots, and the folder of all with the last one."""
    for folder in folders:
        store_of(folder).close()
        shutil.rmtree(folder, ignore_errors=True)
        remove_if_empty(folder.parent)
