"""The repository on the Hub: its name, its branch, who signs in, and what errors mean to who trains."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from littrainer.errors.notes import add_note
from littrainer.hub.timeouts import SilentHubError, bound_silence
from littrainer.hub.tokens import shows_token, without_tokens

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

Answer = TypeVar("Answer")

MAIN_BRANCH = "main"
# What begins so is made by the Hub itself, as for a pull request.
OWN_REFERENCES = "refs/"
# Seconds before each further try to reach the Hub when a Trainer is made.
WAITS = (1.0, 3.0)
# Status of an answer -> what to do about it.
ADVICE: dict[int, str] = {
    401: "The token is missing, wrong or expired: log in with `hf auth login`, or set hub_token to one that may write.",
    402: "The account's plan does not cover this: free storage, or push to another namespace with hub_model_id.",
    403: "This token may not write there, or the storage of the namespace is full: use a token with write access, "
    "free storage, or set hub_model_id to another repository.",
    404: "There is no such repository or revision for this token: look at hub_model_id and hub_revision.",
    409: "Something else was written there at the same time: push again.",
    413: "What is pushed is larger than the Hub takes: free storage, or push less often (hub_strategy, save_steps).",
    429: "Too many requests were sent: push less often (save_steps).",
}
# Of them, what the next upload is answered with as well.
LASTING = (401, 402, 403, 404, 413, 429)
SERVER_FAILS = "The Hub has a problem of its own; push again later."
# As behind a firewall that lets only the Hub itself through.
XET_FAILS = "Xet, which sends large files, does not get through: set HF_HUB_DISABLE_XET=1 to send them by LFS."
NO_ANSWER = "The Hub was not reached, or the connection was cut; look at the network, and at HF_ENDPOINT."
SILENT = "The Hub was silent ({}); look at the network, and at HF_ENDPOINT."
# If a class has one of these in its name, there was no answer.
OF_CONNECTIONS = ("Connect", "Timeout", "Network", "Protocol", "ReadError", "WriteError", "Offline")


@dataclass(slots=True)
class HubState:
    """What a Trainer knows of its repository.

    Attributes:
        model_id: the repository's id; None until it is created.
        asked_for: what `hub_model_id` was when it was created.
        pushes: what is pushed in the background; None before the first push.
    """

    model_id: str | None = None
    asked_for: tuple[str | None] | None = None
    pushes: Any = None


class PushError(RuntimeError):
    """What was to be pushed to the Hub is not there."""


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


def make_repository(trainer: Any, token: str | None = None, private: bool | None = None) -> None:
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
        hub = trainer.session.hub
        hub.model_id, hub.asked_for = created.repo_id, (args.hub_model_id,)
        make_branch(created.repo_id, args.hub_revision, token)


def is_repository_made(trainer: Any) -> bool:
    """Whether there is the repository that the arguments name; a script may set them after it has made the Trainer."""
    # An override of init_hf_repo, or the script, may have set hub_model_id by itself.
    asked_for = trainer.session.hub.asked_for or (trainer.args.hub_model_id,)
    return trainer.hub_model_id is not None and asked_for == (trainer.args.hub_model_id,)


def make_branch(repository: str, revision: str | None, token: str | None) -> None:
    """Create a branch unless it is there, or is none that can be created."""
    if revision is not None and revision != MAIN_BRANCH and not revision.startswith(OWN_REFERENCES):
        _with_patience(lambda: client().create_branch(repository, branch=revision, token=token, exist_ok=True))


def client() -> Any:
    """The Hub's client, for the endpoint that is set, which does not wait for ever."""
    from huggingface_hub import HfApi

    bound_silence()
    return HfApi()


def _with_patience(ask: Callable[[], Answer]) -> Answer:
    """Ask the Hub again if it fails by itself; the client does so for uploads only."""
    for wait in WAITS:
        try:
            return ask()
        except Exception as error:
            if (_status_of(error) or 0) < 500:
                raise
            time.sleep(wait)
    return ask()


# ---- Errors ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def explaining(doing: str, token: str | None) -> Iterator[None]:
    """A block whose errors get a note that says what to do; one that shows the token is replaced.

    Raises:
        PushError: in the place of an error with the token in it.
    """
    try:
        yield
    except Exception as error:
        shown = "\n".join(f"{link!s}{link!r}{getattr(link, '__notes__', '')}" for link in causes(error))
        if shows_token(shown, token):
            raise PushError(f"{doing} failed ({text_of(error, token)}). {advice_for(error)}".rstrip()) from None
        advice = advice_for(error)
        if advice:
            add_note(error, f"It came when {doing}. {advice}")
        raise


def advice_for(error: BaseException) -> str:
    """What to do about an error of a push; empty if its text has to do."""
    for link in causes(error):
        if isinstance(link, SilentHubError):
            return SILENT.format(link)
        status = _status_of(link)
        if status is not None:
            return SERVER_FAILS if status >= 500 else ADVICE.get(status, "")
        if "xet" in f"{type(link).__module__} {link}".lower():
            return XET_FAILS
        if isinstance(link, ConnectionError) or any(part in type(link).__name__ for part in OF_CONNECTIONS):
            return NO_ANSWER
    return ""


def is_silent(error: BaseException) -> bool:
    """Whether the Hub has said nothing for too long."""
    return any(isinstance(link, SilentHubError) for link in causes(error))


def is_lasting(error: BaseException) -> bool:
    """Whether what is sent next would fare no better: the Hub has refused it, or says nothing."""
    status = next((status for link in causes(error) if (status := _status_of(link)) is not None), None)
    return status in LASTING or is_silent(error)


def text_of(error: BaseException, *tokens: Any) -> str:
    """Kind and words of an error in one line, without any token: none of these, and none of who is logged in."""
    words = " ".join(str(error).split())
    return without_tokens(f"{type(error).__name__}: {words}" if words else type(error).__name__, *tokens)


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and what it came from."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _status_of(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None
