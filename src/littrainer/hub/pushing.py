"""What each `hub_strategy` pushes at a save, in the background, and how training ends with such pushes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.arguments.choices import HubStrategy, SaveStrategy
from littrainer.callbacks.state import TrainerState
from littrainer.checkpoint.atomic_write import own_place
from littrainer.checkpoint.layout import TRAINER_STATE_NAME, checkpoint_step
from littrainer.distributed.agreement import agreed, are_several, failing_together, from_first, longest_wait
from littrainer.hub.card.remote import settle_card
from littrainer.hub.progress import Push, PushInProgress, Upload
from littrainer.hub.repository import is_repository_made, make_branch, token_for
from littrainer.hub.sending import WorkInOrder
from littrainer.hub.snapshot import (
    LAST_CHECKPOINT,
    SNAPSHOT_DIR,
    new_snapshot,
    remove_abandoned_snapshots,
    remove_snapshot,
    take_beside_model,
    take_checkpoint,
    take_model,
)
from littrainer.hub.tokens import secrets_of

if TYPE_CHECKING:
    from littrainer.trainer import Trainer


logger = logging.getLogger(__name__)

# The strategies that push checkpoints as well as the model.
WITH_CHECKPOINTS = (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)

# In which the first process, while it waits for the Hub, tells the others that it is there.
LONGEST_SILENCE_SECONDS = 10.0


def push_save(trainer: Trainer, checkpoint: str) -> None:
    """Begin to push a checkpoint that was just written, as `hub_strategy` asks for it.

    While an earlier push is on its way it is left out, unless `hub_always_push` is set; see `push_left_out`.

    Parameters:
        checkpoint: its folder.
    """
    args = trainer.args
    if not trainer.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
        return
    pushes = trainer.push_in_progress
    is_left_out = pushes is not None and not pushes.is_done() and not args.hub_always_push
    if is_left_out:
        logger.info("%s is left out: the push before it is still on its way (hub_always_push).", checkpoint)
        if not isinstance(pushes, PushInProgress):
            # A subclass has put one of transformers' there.
            return
    else:
        trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    pushes = pushes_of(trainer)
    message = _message_of_save(trainer, Path(checkpoint))
    try:
        if not is_repository_made(trainer):
            trainer.init_hf_repo()
        push = _taken(trainer, Path(checkpoint), message)
    except Exception as error:
        # A full disk must not end a training that can go on.
        pushes.note_failure(f'Preparing the push "{message}"', error, token_for(args))
        return
    if is_left_out:
        pushes.leave_out(push)
    else:
        pushes.begin(push)


def push_left_out(trainer: Trainer) -> None:
    """Training ends: begin to push the newest save where it was left out."""
    pushes = trainer.push_in_progress
    push = pushes.taken_left_out() if isinstance(pushes, PushInProgress) else None
    if push is not None:
        logger.info("%s was left out while an earlier push was on its way, and follows.", push.uploads[0].described())
        trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
        pushes.begin(push)


def pushes_of(trainer: Trainer) -> PushInProgress:
    """The pushes of a Trainer; with the first one, what killed programs left of theirs is removed."""
    if not isinstance(trainer.push_in_progress, PushInProgress):
        remove_abandoned_snapshots(Path(trainer.args.output_dir))
        trainer.push_in_progress = PushInProgress()
    pushes: PushInProgress = trainer.push_in_progress
    return pushes


def _taken(trainer: Trainer, checkpoint: Path, message: str) -> Push:
    args = trainer.args
    output_dir = Path(args.output_dir)
    token = token_for(args)
    place = new_snapshot(output_dir, checkpoint.name)
    shared: dict[str, Any] = {
        "repository": trainer.hub_model_id,
        "token": token,
        "secrets": secrets_of(token),
        "origins": (checkpoint, output_dir),
        "revision": args.hub_revision,
        "checkpoint": checkpoint,
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
        make_branch(str(shared["repository"]), shared["revision"], token)
        take_beside_model(output_dir, folder)
        for name in settle_card(folder, str(shared["repository"]), shared["revision"], token):
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


def finish_pushes(trainer: Trainer) -> None:
    """Wait for what is on its way, and try once more what failed; what fails again is a warning."""
    pushes = trainer.push_in_progress
    if isinstance(pushes, PushInProgress):
        pushes.finish()
    elif pushes is not None:
        # A subclass has put one of transformers' there.
        pushes.wait_until_done()


def finish_together(trainer: Trainer) -> str | None:
    """All steps are done: wait in all processes until the first one's pushes are over.

    The processes tell each other again and again that they are there, since a push may take longer than they would wait
    for each other at one place.

    Returns:
        what the Hub lacks, and why; None where it lacks nothing.
    """
    if not trainer.args.push_to_hub or not are_several():
        push_left_out(trainer)
        trainer._finish_current_push()
        return _failure_at_end(trainer)
    with failing_together("pushing the newest save"):
        push_left_out(trainer)
    waiting = WorkInOrder()
    finished = waiting.run(trainer._finish_current_push)
    seconds = min(LONGEST_SILENCE_SECONDS, longest_wait().total_seconds() / 4)
    while agreed(not waiting.wait_until_done(seconds)):
        pass
    finished.result()
    return from_first(_failure_at_end(trainer))


def _failure_at_end(trainer: Trainer) -> str | None:
    return getattr(trainer.push_in_progress, "failure_at_end", None)


@contextlib.contextmanager
def pushes_during_training(trainer: Trainer) -> Iterator[None]:
    """A training, in whose steps the Hub's client draws no bars; where it ends by an error, pushes are told of.

    Raises:
        OSError: a link has the name of the folder from which pushes are sent.
    """
    if not trainer.args.push_to_hub:
        yield
        return
    with failing_together("preparing pushes"):
        own_place(Path(trainer.args.output_dir, SNAPSHOT_DIR))
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
