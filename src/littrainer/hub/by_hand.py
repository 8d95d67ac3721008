"""Pushing where the script asks for it: the model as it is at that moment, and its card."""

from __future__ import annotations

import dataclasses
import logging
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.hub.card.remote import settle_card
from littrainer.hub.card.subject import Given
from littrainer.hub.card.writing import refuse_unknown_keywords
from littrainer.hub.failures import text_of
from littrainer.hub.progress import PushInProgress
from littrainer.hub.pushing import pushes_of
from littrainer.hub.repository import explaining, is_repository_made, make_branch, repository_name, token_for
from littrainer.hub.snapshot import (
    NEVER_PUSHED,
    files_with_secrets,
    new_snapshot,
    remove_snapshot,
    take_beside_model,
)
from littrainer.hub.tokens import remove_files_with_secrets, secrets_of, warn_of_secret
from littrainer.hub.transfer import upload_folder

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)

# Commit message of a push by hand that names none.
END_OF_TRAINING = "End of training"


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

    Raises:
        TypeError: `create_model_card` takes no such keyword.
    """
    args = trainer.args
    card.setdefault("model_name", repository_name(args).rpartition("/")[2])
    tags = _with_tags_of_model(trainer, card.get("tags"))
    if tags is not None:
        card["tags"] = tags
    refuse_unknown_keywords(trainer.create_model_card, card)
    # An override of create_model_card may take others too.
    given = Given(**{field.name: card.get(field.name) for field in dataclasses.fields(Given)})
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    token = token_for(args, token)
    if not is_repository_made(trainer):
        trainer.init_hf_repo(token=token, private=private)
    trainer.save_model(_internal_call=True)
    if not trainer.is_world_process_zero():
        return None
    trainer.create_model_card(**card)
    # Where that fails, what is pushed next takes its place.
    trainer._finish_current_push()
    if isinstance(trainer.push_in_progress, PushInProgress):
        # It would go over a newer model.
        trainer.push_in_progress.drop_left_out()
    revision = args.hub_revision if revision is None else revision
    repository = trainer.hub_model_id
    output_dir = Path(args.output_dir)
    secrets = secrets_of(token, args.hub_token)

    def send(folder: Path, left_out: list[str]) -> Any:
        with explaining(f"pushing to {repository}", token):
            make_branch(str(repository), revision, token)
            kept_there = settle_card(folder, str(repository), revision, token, given)
            return upload_folder(
                repo_id=repository,
                folder_path=folder,
                commit_message=commit_message,
                token=token,
                revision=revision,
                ignore_patterns=[*NEVER_PUSHED, *left_out, *kept_there],
            )

    if blocking:
        commit = send(output_dir, _told_of(output_dir, secrets))
        if isinstance(trainer.push_in_progress, PushInProgress):
            trainer.push_in_progress.send_wanted()
            trainer.push_in_progress.wait_until_done()
        return commit
    pushes = pushes_of(trainer)
    # The script may save or train again before it is sent.
    place = new_snapshot(output_dir, "by-hand")
    try:
        take_beside_model(output_dir, place / "model")
    except BaseException:
        remove_snapshot(place)
        raise

    def send_snapshot() -> Any:
        try:
            remove_files_with_secrets(place / "model", secrets, (output_dir,))
            return send(place / "model", [])
        except Exception as error:
            logger.warning("Pushing to %s failed (%s).", repository, text_of(error, token))
            raise
        finally:
            remove_snapshot(place)

    job: Future[Any] = pushes.run(send_snapshot)
    # It may be cancelled before it begins.
    job.add_done_callback(lambda _: remove_snapshot(place))
    pushes.send_wanted()
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
