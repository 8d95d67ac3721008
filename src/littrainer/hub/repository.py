"""The repository on the Hub that a Trainer pushes to: its name, its privacy, its branch, and who signs in."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from littrainer.errors.notes import add_note
from littrainer.hub.failures import PushError, advice_for, tells, text_of
from littrainer.hub.silence import silence_bounded

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.trainer import Trainer

Answer = TypeVar("Answer")

MAIN_BRANCH = "main"
# What begins so is made by the Hub itself, as for a pull request.
OWN_REFERENCES = "refs/"
# Seconds before each further try to reach the Hub when a Trainer is made.
WAITS = (1.0, 3.0)


def repository_name(args: TrainingArguments) -> str:
    """The repository's name, with or without its namespace: `hub_model_id`, or the name of the output folder."""
    return args.hub_model_id or Path(str(args.output_dir)).absolute().name


def token_for(args: TrainingArguments, token: str | None = None) -> str | None:
    """The token to sign in with; None lets the Hub's client take the one that is logged in.

    Parameters:
        token: one in the place of `hub_token`.
    """
    chosen = args.hub_token if token is None else token
    # White space around it, as a file's last line has it, would be refused with an error that shows the token.
    return (chosen.strip() or None) if isinstance(chosen, str) else chosen


def make_repository(trainer: Trainer, token: str | None = None, private: bool | None = None) -> None:
    """Create the repository unless there is one, and the branch of `hub_revision`; note its id on the Trainer.

    Parameters:
        token: one in the place of `hub_token`.
        private: in the place of `hub_private_repo`; without effect on a repository that is there.

    Raises:
        huggingface_hub.errors.HfHubHTTPError: the Hub refuses it; a note says what to do.
    """
    args = trainer.args
    token = token_for(args, token)
    private = args.hub_private_repo if private is None else private
    name = repository_name(args)
    with explaining(f"creating the repository {name}", token):
        created = _with_patience(lambda: client().create_repo(name, token=token, private=private, exist_ok=True))
        trainer.hub_model_id, trainer._hub_model_id_asked_for = created.repo_id, (args.hub_model_id,)
        make_branch(created.repo_id, args.hub_revision, token)


def is_repository_made(trainer: Trainer) -> bool:
    """Whether there is the repository that the arguments name; a script may set them after it has made the Trainer."""
    # An override of init_hf_repo, or the script, may have set hub_model_id by itself.
    asked_for = trainer._hub_model_id_asked_for or (trainer.args.hub_model_id,)
    return trainer.hub_model_id is not None and asked_for == (trainer.args.hub_model_id,)


def make_branch(repository: str, revision: str | None, token: str | None) -> None:
    """Create a branch unless it is there, or is none that can be created."""
    if revision is None or revision == MAIN_BRANCH or revision.startswith(OWN_REFERENCES):
        return
    _with_patience(lambda: client().create_branch(repository, branch=revision, token=token, exist_ok=True))


def client() -> Any:
    """The Hub's client, for the endpoint that is set."""
    from huggingface_hub import HfApi

    return HfApi()


@contextlib.contextmanager
def explaining(doing: str, token: str | None) -> Iterator[None]:
    """A block whose errors get a note that says what to do; one that shows the token is replaced.

    Raises:
        PushError: in the place of an error with the token in it.
    """
    try:
        with silence_bounded():
            yield
    except Exception as error:
        if tells(error, token):
            raise PushError(f"{doing} failed ({text_of(error, token)}). {advice_for(error)}".rstrip()) from None
        advice = advice_for(error)
        if advice:
            add_note(error, f"It came when {doing}. {advice}")
        raise


def _with_patience(ask: Callable[[], Answer]) -> Answer:
    """Ask the Hub again where it fails by itself; the client does so for uploads only."""
    for wait in WAITS:
        try:
            return ask()
        except Exception as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            if not isinstance(status, int) or status < 500:
                raise
            time.sleep(wait)
    return ask()
