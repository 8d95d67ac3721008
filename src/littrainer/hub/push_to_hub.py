"""Pushing the model: at each save as `hub_strategy` asks for it, when training ends, and when a script asks for it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.arguments.choices import HubStrategy, SaveStrategy
from littrainer.callbacks.state import TrainerState
from littrainer.checkpoint.distributed_resume import LAST_CHECKPOINT
from littrainer.checkpoint.layout import TRAINER_STATE_NAME, checkpoint_step
from littrainer.distributed.agreement import are_several, from_first, while_others_wait
from littrainer.hub.repository import explaining, remove_files_with_tokens, repository_name, text_of, token_for
from littrainer.hub.snapshot import (
    filled_snapshot,
    remove_abandoned_snapshots,
    remove_snapshots,
    take_beside_model,
    take_checkpoint,
    take_model,
)
from littrainer.hub.uploads import PushInProgress, Upload

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


logger = logging.getLogger(__name__)

# The strategies that push checkpoints as well as the model.
WITH_CHECKPOINTS = (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)
# Commit message of a push by the script that names none.
END_OF_TRAINING = "End of training"


def push_save(trainer: Any, checkpoint: str) -> Any:
    """Begin to push a checkpoint that was just written, as `hub_strategy` asks for it.

    While an earlier push is on its way it is left out, unless `hub_always_push` is set.

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
    pushes = pushes_of(args, earlier)
    message = _message_of_save(args, trainer.state, Path(checkpoint))
    try:
        if trainer.hub_model_id is None:
            trainer.init_hf_repo()
        uploads = _set_aside(args, trainer.hub_model_id, Path(checkpoint), message)
    except Exception as error:
        # A full disk must not end a training that can go on.
        pushes.note_failure(f'Preparing the push "{message}"', error, token_for(args))
    else:
        pushes.begin(uploads)
    return pushes


def pushes_of(args: TrainingArguments, so_far: Any) -> PushInProgress:
    """Return the pushes of a Trainer; with the first one, what killed programs left of theirs is removed."""
    if isinstance(so_far, PushInProgress):
        return so_far
    remove_abandoned_snapshots(Path(args.output_dir))
    return PushInProgress()


def _set_aside(args: TrainingArguments, repository: str, checkpoint: Path, message: str) -> list[Upload]:
    output_dir = Path(args.output_dir)
    with filled_snapshot(output_dir, checkpoint.name) as place:
        take_model(checkpoint, place / "model")
        if args.hub_strategy in WITH_CHECKPOINTS:
            take_checkpoint(checkpoint, place / "checkpoint")
    upload = functools.partial(
        Upload, repository=repository, token=token_for(args), revision=args.hub_revision, checkpoint=checkpoint
    )
    beside = functools.partial(take_beside_model, output_dir, place / "model")
    of_model = upload(folder=place / "model", message=message, prepare=beside)
    if args.hub_strategy not in WITH_CHECKPOINTS:
        return [of_model]
    is_last = args.hub_strategy == HubStrategy.CHECKPOINT
    of_checkpoint = upload(
        folder=place / "checkpoint",
        message=f"{message}, checkpoint",
        path_in_repo=LAST_CHECKPOINT if is_last else checkpoint.name,
        stays_wanted=not is_last,
    )
    return [of_model, of_checkpoint]


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


def finish_together(finish: Callable[[], None], pushes: Callable[[], Any], are_there_any: bool) -> str | None:
    """All steps are done: finish the first process's pushes, while the others wait.

    Returns:
        what the Hub lacks, and why; None if it lacks nothing.
    """
    if not are_there_any or not are_several():
        finish()
        return getattr(pushes(), "failure_at_end", None)
    while_others_wait(finish)
    return from_first(getattr(pushes(), "failure_at_end", None))


@contextlib.contextmanager
def pushes_during_training(pushes: Callable[[], Any]) -> Iterator[None]:
    """Train in the block; if it ends by an error, a line names the pushes that are on their way."""
    try:
        yield
    except BaseException:
        if isinstance(on_their_way := pushes(), PushInProgress):
            on_their_way.go_on_without_training()
        raise


# ---- A push that the script asks for ---------------------------------------------------------------------------------


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
        finish_earlier: waits for what is on its way, and gives what sends this push.
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
    if trainer.hub_model_id is None:
        trainer.init_hf_repo(token=token, private=private)
    trainer.save_model(_internal_call=True)
    if not trainer.is_world_process_zero():
        return None
    trainer.create_model_card(**card)
    # If that fails, what is pushed next takes its place.
    pushes = finish_earlier()
    output_dir, repository = Path(args.output_dir), str(trainer.hub_model_id)
    branch = args.hub_revision if revision is None else revision
    with filled_snapshot(output_dir, "by-hand") as place:
        (place / "model").mkdir()
        # The script may save or train again before it is sent in the background.
        take_beside_model(output_dir, place / "model", links=blocking)
    upload = Upload(repository, place / "model", commit_message, token, branch)

    def send() -> Any:
        try:
            with explaining(f"pushing to {repository}", token):
                remove_files_with_tokens(upload.folder, args.hub_token)
                return upload.send()
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
