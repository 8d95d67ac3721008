"""What each `hub_strategy` pushes, and when: at every save in the background, and where the script asks for it."""

from __future__ import annotations

import contextlib
import logging
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
from littrainer.hub.sending import WorkInOrder
from littrainer.hub.snapshot import (
    LAST_CHECKPOINT,
    NEVER_PUSHED,
    SNAPSHOT_DIR,
    files_with_secrets,
    remove_snapshot,
    remove_snapshots,
    take_beside_model,
    take_checkpoint,
    take_model,
)
from littrainer.hub.tokens import remove_files_with_secrets, secrets_of, warn_of_secret
from littrainer.hub.transfer import upload_folder
from littrainer.processes.agreement import agreed, are_several, longest_wait

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)

# Commit message of a push by hand that names none.
END_OF_TRAINING = "End of training"
# The strategies that push checkpoints as well as the model.
WITH_CHECKPOINTS = (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)

# In which the first process, while it waits for the Hub, tells the others that it is there.
LONGEST_SILENCE_SECONDS = 10.0


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
    pushes = _pushes_of(trainer)
    message = _message_of_save(trainer, Path(checkpoint))
    try:
        if trainer.hub_model_id is None:
            # The argument was set after the Trainer was made.
            trainer.init_hf_repo()
        push = _taken(trainer, Path(checkpoint), message)
    except Exception as error:
        # A full disk must not end a training that can go on.
        pushes.note_failure(f'Preparing the push "{message}"', error, token_for(args))
        return
    pushes.begin(push)


def _pushes_of(trainer: Trainer) -> PushInProgress:
    if not isinstance(trainer.push_in_progress, PushInProgress):
        remove_snapshots(Path(trainer.args.output_dir))
        trainer.push_in_progress = PushInProgress()
    pushes: PushInProgress = trainer.push_in_progress
    return pushes


def _taken(trainer: Trainer, checkpoint: Path, message: str) -> Push:
    args = trainer.args
    output_dir = Path(args.output_dir)
    token = token_for(args)
    place = output_dir / SNAPSHOT_DIR / f"{checkpoint.name}-{uuid.uuid4().hex[:8]}"
    shared: dict[str, Any] = {
        "repository": trainer.hub_model_id,
        "token": token,
        "secrets": secrets_of(token),
        "origins": (checkpoint, output_dir),
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
        remove_snapshot(place)
        raise

    def add_what_lies_beside() -> None:
        folder = place / "model"
        take_beside_model(output_dir, folder)
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
    output_dir = Path(args.output_dir)
    secrets = secrets_of(token, args.hub_token)

    def send(folder: Path, left_out: list[str]) -> Any:
        with explaining(f"pushing to {repository}", token):
            make_branch(str(repository), revision, token)
            kept_there = cards_not_pushed(folder, str(repository), revision, token)
            return upload_folder(
                repo_id=repository,
                folder_path=folder,
                commit_message=commit_message,
                token=token,
                revision=revision,
                ignore_patterns=[*NEVER_PUSHED, *left_out, *kept_there],
            )

    if blocking:
        return send(output_dir, _told_of(output_dir, secrets))
    pushes = _pushes_of(trainer)
    # The script may save or train again before it is sent.
    place = output_dir / SNAPSHOT_DIR / f"by-hand-{uuid.uuid4().hex[:8]}"
    try:
        take_beside_model(output_dir, place)
    except BaseException:
        remove_snapshot(place)
        raise

    def send_snapshot() -> Any:
        try:
            remove_files_with_secrets(place, secrets, (output_dir,))
            return send(place, [])
        except Exception as error:
            logger.warning("Pushing to %s failed (%s).", repository, text_of(error, token))
            raise
        finally:
            remove_snapshot(place)

    job: Future[Any] = pushes.run(send_snapshot)
    # It may be cancelled before it begins.
    job.add_done_callback(lambda _: remove_snapshot(place))
    return job


def _with_tags_of_model(trainer: Trainer, given: Any) -> list[str] | None:
    of_model = getattr(trainer.model, "model_tags", None)
    if of_model is None:
        return given
    tags = [given] if isinstance(given, str) else list(given or [])
    return list(dict.fromkeys([*tags, *of_model]))


def _told_of(output_dir: Path, secrets: tuple[bytes, ...]) -> list[str]:
    """Files with a secret in them, as patterns that match nothing else, told of in a warning."""
    found = files_with_secrets(output_dir, secrets)
    for name in found:
        warn_of_secret(output_dir / name)
    return ["".join(f"[{sign}]" if sign in "*?[" else sign for sign in name) for name in found]


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


def finish_together(trainer: Trainer) -> None:
    """All steps are done: wait in all processes until the first one's pushes are over.

    The processes tell each other again and again that they are there, since a push may take longer than they would wait
    for each other at one place.

    Raises:
        PushError: what failed, failed again.
    """
    if not trainer.args.push_to_hub or not are_several():
        trainer._finish_current_push()
        return
    waiting = WorkInOrder()
    finished = waiting.run(trainer._finish_current_push)
    seconds = min(LONGEST_SILENCE_SECONDS, longest_wait().total_seconds() / 4)
    while agreed(not waiting.wait_until_done(seconds)):
        pass
    finished.result()


@contextlib.contextmanager
def pushes_during_training(trainer: Trainer) -> Iterator[None]:
    """A training, in whose steps the Hub's client draws no bars; where it ends by an error, pushes are told of."""
    if not trainer.args.push_to_hub:
        yield
        return
    try:
        with _without_upload_bars():
            yield
    except BaseException:
        if isinstance(trainer.push_in_progress, PushInProgress):
            trainer.push_in_progress.go_on_without_training()
        raise


@contextlib.contextmanager
def _without_upload_bars() -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
