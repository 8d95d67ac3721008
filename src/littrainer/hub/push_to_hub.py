"""Pushing the model: at each save as `hub_strategy` asks for it, when training ends, and when a script asks for it."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.arguments.choices import HubStrategy, SaveStrategy
from littrainer.callbacks.state import TrainerState
from littrainer.checkpoint.atomic_write import own_place
from littrainer.checkpoint.layout import TRAINER_STATE_NAME, checkpoint_step
from littrainer.distributed.agreement import agreed, are_several, failing_together, from_first, longest_wait
from littrainer.hub.model_card import card_left_out
from littrainer.hub.repository import (
    explaining,
    is_repository_made,
    make_branch,
    repository_name,
    text_of,
    token_for,
)
from littrainer.hub.snapshot import (
    LAST_CHECKPOINT,
    SNAPSHOT_DIR,
    new_snapshot,
    remove_abandoned_snapshots,
    remove_snapshots,
    take_beside_model,
    take_checkpoint,
    take_model,
)
from littrainer.hub.tokens import remove_files_with_secrets, secrets_of
from littrainer.hub.uploads import Push, PushInProgress, Upload

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


logger = logging.getLogger(__name__)

# The strategies that push checkpoints as well as the model.
WITH_CHECKPOINTS = (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)
# In which the first process, while it waits for the Hub, shows the others that it is there.
LONGEST_SILENCE_SECONDS = 10.0
# Commit message of a push by the script that names none.
END_OF_TRAINING = "End of training"


def push_save(trainer: Any, checkpoint: str) -> None:
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
    message = _message_of_save(args, trainer.state, Path(checkpoint))
    try:
        if not is_repository_made(trainer):
            trainer.init_hf_repo()
        push = _taken(args, str(trainer.hub_model_id), Path(checkpoint), message)
    except Exception as error:
        # A full disk must not end a training that can go on.
        pushes.note_failure(f'Preparing the push "{message}"', error, token_for(args))
        return
    if is_left_out:
        pushes.leave_out(push)
    else:
        pushes.begin(push)


def push_left_out(trainer: Any) -> None:
    """Training ends: begin to push the newest save if it was left out."""
    pushes = trainer.push_in_progress
    push = pushes.taken_left_out() if isinstance(pushes, PushInProgress) else None
    if push is not None:
        logger.info("%s was left out while an earlier push was on its way, and follows.", push.uploads[0].described())
        trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
        pushes.begin(push)


def pushes_of(trainer: Any) -> PushInProgress:
    """The pushes of a Trainer; with the first one, what killed programs left of theirs is removed."""
    if not isinstance(trainer.push_in_progress, PushInProgress):
        remove_abandoned_snapshots(Path(trainer.args.output_dir))
        trainer.session.hub.pushes = PushInProgress()
    pushes: PushInProgress = trainer.push_in_progress
    return pushes


def _taken(args: TrainingArguments, repository: str, checkpoint: Path, message: str) -> Push:
    output_dir = Path(args.output_dir)
    token = token_for(args)
    place = new_snapshot(output_dir, checkpoint.name)
    shared: dict[str, Any] = {
        "repository": repository,
        "token": token,
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
                    stays_wanted=not is_last,
                    **shared,
                )
            )
    except BaseException:
        remove_snapshots(place)
        raise

    def add_what_lies_beside() -> None:
        take_beside_model(output_dir, place / "model")
        _make_ready(place / "model", repository, shared["revision"], token)

    return Push(uploads, add_what_lies_beside)


def _make_ready(folder: Path, repository: str, revision: str | None, token: str | None) -> None:
    """Make the branch, and take a card out of the folder that must not replace the Hub's."""
    make_branch(repository, revision, token)
    for name in card_left_out(folder, repository, revision, token):
        (folder / name).unlink()


def _message_of_save(args: TrainingArguments, state: TrainerState, checkpoint: Path) -> str:
    step = checkpoint_step(checkpoint)
    if args.save_strategy == SaveStrategy.STEPS:
        return f"Training in progress, step {state.global_step if step is None else step}"
    epoch = state.epoch
    written = checkpoint / TRAINER_STATE_NAME
    if step not in (None, state.global_step) and written.is_file():
        # It was written in the background, while training went on.
        epoch = TrainerState.load_from_json(str(written)).epoch
    return f"Training in progress, epoch {int(epoch or 0)}"


# ---- The end of a training -------------------------------------------------------------------------------------------


def finish_pushes(pushes: Any) -> None:
    """Wait for what is on its way, and try once more what failed; what fails again is a warning."""
    if isinstance(pushes, PushInProgress):
        pushes.finish()
    elif pushes is not None:
        # A subclass has put one of transformers' there.
        pushes.wait_until_done()


def finish_together(trainer: Any) -> str | None:
    """All steps are done: wait in all processes until the first one's pushes are over.

    The processes agree again and again that they are there, since a push may take longer than they would wait for each
    other at one place.

    Returns:
        what the Hub lacks, and why; None if it lacks nothing.
    """
    finish = trainer._finish_current_push
    if not trainer.args.push_to_hub or not are_several():
        push_left_out(trainer)
        finish()
        return getattr(trainer.push_in_progress, "failure_at_end", None)
    with failing_together("pushing the newest save"):
        push_left_out(trainer)
    pool = ThreadPoolExecutor(1)
    finished = pool.submit(finish)
    pool.shutdown(wait=False)
    seconds = min(LONGEST_SILENCE_SECONDS, longest_wait().total_seconds() / 4)
    while agreed(bool(wait([finished], seconds).not_done)):
        pass
    finished.result()
    return from_first(getattr(trainer.push_in_progress, "failure_at_end", None))


@contextlib.contextmanager
def pushes_during_training(trainer: Any) -> Iterator[None]:
    """A training, in whose steps the Hub's client draws no bars; if it ends by an error, a line names the pushes.

    Raises:
        OSError: a link has the name of the folder from which pushes are sent.
    """
    if not trainer.args.push_to_hub:
        yield
        return
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    with failing_together("preparing pushes"):
        own_place(Path(trainer.args.output_dir, SNAPSHOT_DIR))
    shows_bars = not are_progress_bars_disabled()
    if shows_bars:
        disable_progress_bars()
    try:
        yield
    except BaseException:
        if isinstance(trainer.push_in_progress, PushInProgress):
            trainer.push_in_progress.go_on_without_training()
        raise
    finally:
        if shows_bars:
            enable_progress_bars()


# ---- A push that the script asks for ---------------------------------------------------------------------------------


def push_model(
    trainer: Any,
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
        what the Hub's client says of the commit, or a Future of it if `blocking` is False; None in the other processes.

    Raises:
        TypeError: `create_model_card` takes no such keyword.
    """
    args = trainer.args
    card.setdefault("model_name", repository_name(args).rpartition("/")[2])
    of_model = getattr(trainer.model, "model_tags", None)
    if of_model is not None:
        tags = card.get("tags")
        card["tags"] = list(dict.fromkeys([*([tags] if isinstance(tags, str) else tags or []), *of_model]))
    # In all processes, and before anything is done.
    inspect.signature(trainer.create_model_card).bind(**card)
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    token = token_for(args, token)
    if not is_repository_made(trainer):
        trainer.init_hf_repo(token=token, private=private)
    trainer.save_model(_internal_call=True)
    if not trainer.is_world_process_zero():
        return None
    trainer.create_model_card(**card)
    # If that fails, what is pushed next takes its place.
    trainer._finish_current_push()
    pushes = pushes_of(trainer)
    # It would go over a newer model.
    pushes.drop_left_out()
    output_dir, repository = Path(args.output_dir), str(trainer.hub_model_id)
    branch = args.hub_revision if revision is None else revision
    place = new_snapshot(output_dir, "by-hand")
    folder = place / "model"
    try:
        folder.mkdir()
        # The script may save or train again before it is sent in the background.
        take_beside_model(output_dir, folder, links=blocking)
    except BaseException:
        remove_snapshots(place)
        raise

    def send() -> Any:
        try:
            with explaining(f"pushing to {repository}", token):
                _make_ready(folder, repository, branch, token)
                remove_files_with_secrets(folder, secrets_of(args.hub_token))
                return Upload(repository, folder, commit_message, token, branch).send()
        except Exception as error:
            if not blocking:
                logger.warning("Pushing to %s failed (%s).", repository, text_of(error, token))
            raise
        finally:
            remove_snapshots(place)

    if blocking:
        commit = send()
        pushes.send_wanted()
        pushes.wait_until_done()
        return commit
    job: Future[Any] = pushes.run(send)
    # It may be cancelled before it begins.
    job.add_done_callback(lambda _: remove_snapshots(place))
    pushes.send_wanted()
    return job
