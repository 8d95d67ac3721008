"""What each `hub_strategy` pushes, and when: at every save in the background, and where the script asks for it."""

from __future__ import annotations

import contextlib
import logging
import shutil
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.arguments.choices import HubStrategy, SaveStrategy
from littrainer.callbacks.state import TrainerState
from littrainer.checkpoint.layout import TRAINER_STATE_NAME, checkpoint_step
from littrainer.hub.card.remote import cards_not_pushed
from littrainer.hub.failures import PushError, text_of
from littrainer.hub.progress import Push, PushInProgress, Upload
from littrainer.hub.repository import explaining, make_branch, repository_name, token_for
from littrainer.hub.snapshot import (
    LAST_CHECKPOINT,
    NEVER_PUSHED,
    SNAPSHOT_DIR,
    files_with_secrets,
    remove_snapshots,
    take_beside_model,
    take_checkpoint,
    take_model,
)
from littrainer.hub.transfer import upload_folder

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)

# Commit message of a push by hand that names none.
END_OF_TRAINING = "End of training"
# The strategies that push checkpoints as well as the model.
WITH_CHECKPOINTS = (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)


def push_save(trainer: Trainer, checkpoint: str) -> None:
    """Begin to push a checkpoint that was just written, as `hub_strategy` asks for it.

    Nothing is pushed while an earlier push is on its way, unless `hub_always_push` is set.

    Parameters:
        checkpoint: its folder.
    """
    args = trainer.args
    if not trainer.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
        return
    pushes = trainer.push_in_progress
    if pushes is not None and not pushes.is_done() and not args.hub_always_push:
        logger.info("%s is not pushed: the push before it is still on its way (hub_always_push).", checkpoint)
        return
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    if not isinstance(pushes, PushInProgress):
        remove_snapshots(Path(args.output_dir))
        pushes = trainer.push_in_progress = PushInProgress()
    message = _message_of_save(trainer, Path(checkpoint))
    try:
        if trainer.hub_model_id is None:
            # The argument was set after the Trainer was made.
            trainer.init_hf_repo()
        push = _taken(trainer, Path(checkpoint), message)
    except Exception as error:
        # A full disk must not end a training that can go on.
        pushes.note_failure(f'Preparing the push "{message}"', error)
        return
    pushes.begin(push)


def _taken(trainer: Trainer, checkpoint: Path, message: str) -> Push:
    args = trainer.args
    output_dir = Path(args.output_dir)
    token = token_for(args)
    place = output_dir / SNAPSHOT_DIR / f"{checkpoint.name}-{uuid.uuid4().hex[:8]}"
    shared: dict[str, Any] = {
        "repository": trainer.hub_model_id,
        "token": token,
        "revision": args.hub_revision,
    }
    uploads = [Upload(folder=place / "model", message=message, **shared)]
    try:
        take_model(checkpoint, place / "model")
        if args.hub_strategy in WITH_CHECKPOINTS:
            take_checkpoint(checkpoint, place / "checkpoint")
            is_last = args.hub_strategy == HubStrategy.CHECKPOINT
            uploads.append(
                Upload(
                    folder=place / "checkpoint",
                    message=f"{message}, checkpoint",
                    path_in_repo=LAST_CHECKPOINT if is_last else checkpoint.name,
                    replaces_folder=True,
                    stays_wanted=not is_last,
                    **shared,
                )
            )
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise

    def add_what_lies_beside() -> None:
        folder = place / "model"
        take_beside_model(output_dir, folder, secrets_of(token))
        for name in cards_not_pushed(folder, str(shared["repository"]), args.hub_revision, token):
            (folder / name).unlink()

    return Push(uploads, add_what_lies_beside)


def _message_of_save(trainer: Trainer, checkpoint: Path) -> str:
    step, state = checkpoint_step(checkpoint), trainer.state
    if trainer.args.save_strategy == SaveStrategy.STEPS:
        return f"Training in progress, step {state.global_step if step is None else step}"
    epoch = state.epoch
    written = checkpoint / TRAINER_STATE_NAME
    if step not in (None, state.global_step) and written.is_file():
        # It was written in the background, while training went on.
        epoch = TrainerState.load_from_json(str(written)).epoch
    return f"Training in progress, epoch {int(epoch or 0)}"


def push_model(
    trainer: Trainer,
    commit_message: str | None,
    blocking: bool,
    token: str | None,
    revision: str | None,
    private: bool | None,
    **card: Any,
) -> Any:
    """Save the model to `output_dir`, write its card and push both; all processes call this, the first one pushes.

    Parameters:
        card: what `create_model_card` takes.

    Returns:
        what the Hub's client says of the commit, or a Future of it where `blocking` is False; None in the other
        processes.
    """
    args = trainer.args
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    token = token_for(args, token)
    if trainer.hub_model_id is None:
        trainer.init_hf_repo(token=token, private=private)
    trainer.save_model(_internal_call=True)
    if not trainer.is_world_process_zero():
        return None
    card.setdefault("model_name", repository_name(args).rpartition("/")[2])
    tags = _with_tags_of_model(trainer, card.get("tags"))
    if tags is not None:
        card["tags"] = tags
    trainer.create_model_card(**card)
    wait_or_warn(trainer)
    revision = args.hub_revision if revision is None else revision
    repository = trainer.hub_model_id

    def send() -> Any:
        with explaining(f"pushing to {repository}", token):
            make_branch(str(repository), revision, token)
            kept_there = cards_not_pushed(Path(args.output_dir), str(repository), revision, token)
            return upload_folder(
                repo_id=repository,
                folder_path=args.output_dir,
                commit_message=commit_message,
                token=token,
                revision=revision,
                ignore_patterns=[*NEVER_PUSHED, *_told_of(args, token), *kept_there],
            )

    if blocking:
        return send()
    if not isinstance(trainer.push_in_progress, PushInProgress):
        trainer.push_in_progress = PushInProgress()
    job: Future[Any] = trainer.push_in_progress.run(send)
    job.add_done_callback(lambda done: _warn_of(done, str(repository), token))
    return job


def _with_tags_of_model(trainer: Trainer, given: Any) -> list[str] | None:
    of_model = getattr(trainer.model, "model_tags", None)
    if of_model is None:
        return given
    tags = [given] if isinstance(given, str) else list(given or [])
    return list(dict.fromkeys([*tags, *of_model]))


def _told_of(args: TrainingArguments, token: str | None) -> list[str]:
    """Files with the token in them, as patterns that match nothing else, told of in a warning."""
    found = files_with_secrets(Path(args.output_dir), secrets_of(token))
    for name in found:
        logger.warning("%s is not pushed to the Hub: an access token is in it.", Path(args.output_dir) / name)
    return ["".join(f"[{sign}]" if sign in "*?[" else sign for sign in name) for name in found]


def secrets_of(token: str | None) -> tuple[bytes, ...]:
    """The token that is used, and the one that is logged in."""
    from huggingface_hub import get_token

    return tuple({text.encode() for text in (token, get_token()) if isinstance(text, str) and text})


def wait_or_warn(trainer: Trainer) -> None:
    """Wait for what is on its way; where it failed, what is pushed next takes its place."""
    try:
        trainer._finish_current_push()
    except PushError as error:
        logger.warning("%s What is pushed now takes its place.", error)


def finish_pushes(trainer: Trainer) -> None:
    """Wait for what is on its way, and try once more what failed.

    Raises:
        PushError: it failed again.
    """
    pushes = trainer.push_in_progress
    if pushes is None:
        return
    if not pushes.is_done():
        logger.info("Waiting for the push to the Hub that is on its way.")
    if isinstance(pushes, PushInProgress):
        pushes.finish()
    else:
        # A subclass has put one of transformers' there.
        pushes.wait_until_done()


def _warn_of(job: Future[Any], repository: str, token: str | None) -> None:
    error = None if job.cancelled() else job.exception()
    if error is not None:
        logger.warning("Pushing to %s failed (%s).", repository, text_of(error, token))


@contextlib.contextmanager
def without_upload_bars(args: TrainingArguments) -> Iterator[None]:
    """A training: the Hub's client would draw the bars of its uploads into those of the steps."""
    if not args.push_to_hub:
        yield
        return
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
