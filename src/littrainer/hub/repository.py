"""The repository on the Hub: name and branch, authentication, advice on errors, and redaction of access tokens."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.arguments.secrets import mask_secret, redact_secrets
from littrainer.runtime.notes import add_note
from littrainer.runtime.tracebacks import error_and_reasons

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)

CARD_NAME = "README.md"
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
MAIN_BRANCH = "main"
# For references of the Hub itself, such as pull requests.
HUB_REFERENCE_PREFIX = "refs/"
# HTTP status -> advice.
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
SERVER_ERROR_ADVICE = "The Hub itself has a problem; push again later."
# A firewall may admit only the Hub itself.
XET_ADVICE = "Xet, which sends large files, does not get through: set HF_HUB_DISABLE_XET=1 to send them by LFS."
UNREACHABLE_ADVICE = "The Hub was not reached, or the connection was cut; look at the network, and at HF_ENDPOINT."
HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}\b")
# Names and pickled values are stored before tensors.
MAX_SEARCHED_BYTES = 16 << 20
CONNECTION_ERROR_NAMES = ("Connect", "Timeout", "Network", "Protocol", "ReadError", "WriteError", "Offline")


@dataclass(slots=True)
class HubState:
    """The repository of a Trainer.

    Attributes:
        model_id: None until the repository is created.
        pushes: the pushes in the background.
    """

    model_id: str | None = None
    pushes: Any = None


class PushError(RuntimeError):
    """A push to the Hub has failed."""


def repository_name(args: TrainingArguments) -> str:
    """Return `hub_model_id`, or the name of the output folder, which has no namespace."""
    return args.hub_model_id or Path(str(args.output_dir)).absolute().name


def choose_token(args: TrainingArguments, token: str | None = None) -> str | None:
    """Return the access token, by default `hub_token`; None selects the logged-in token."""
    chosen = args.hub_token if token is None else token
    # White space, such as a file's last newline, would be refused with an error that contains the token.
    return (chosen.strip() or None) if isinstance(chosen, str) else chosen


def make_repository(args: TrainingArguments, token: str | None = None, private: bool | None = None) -> str:
    """Create the repository and the branch of `hub_revision`, unless they exist; return the repository's id."""
    from huggingface_hub import HfApi

    token = choose_token(args, token)
    private = args.hub_private_repo if private is None else private
    name = repository_name(args)
    with explain_errors(f"creating the repository {name}", token):
        repository: str = HfApi().create_repo(name, token=token, private=private, exist_ok=True).repo_id
        make_branch(repository, args.hub_revision, token)
    return repository


def make_branch(repository: str, revision: str | None, token: str | None) -> None:
    """Create a branch, unless its name is a reference of the Hub itself."""
    if revision is not None and revision != MAIN_BRANCH and not revision.startswith(HUB_REFERENCE_PREFIX):
        from huggingface_hub import HfApi

        HfApi().create_branch(repository, branch=revision, token=token, exist_ok=True)


# ---- Errors ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def explain_errors(doing: str, token: str | None) -> Iterator[None]:
    """Add advice to errors of the block; replace an error that contains the token by a PushError."""
    try:
        yield
    except Exception as error:
        shown = "\n".join(f"{link!s}{link!r}{getattr(link, '__notes__', '')}" for link in error_and_reasons(error))
        if contains_token(shown, token):
            raise PushError(f"{doing} failed ({describe_error(error, token)}). {advise(error)}".rstrip()) from None
        advice = advise(error)
        if advice:
            add_note(error, f"It was raised when {doing}. {advice}")
        raise


def advise(error: BaseException) -> str:
    for link in error_and_reasons(error):
        status = getattr(getattr(link, "response", None), "status_code", None)
        if isinstance(status, int):
            return SERVER_ERROR_ADVICE if status >= 500 else ADVICE.get(status, "")
        if "xet" in f"{type(link).__module__} {link}".lower():
            return XET_ADVICE
        if isinstance(link, ConnectionError) or any(part in type(link).__name__ for part in CONNECTION_ERROR_NAMES):
            return UNREACHABLE_ADVICE
    return ""


def describe_error(error: BaseException, *tokens: Any) -> str:
    """Return class and message of an error in one line, without access tokens."""
    message = " ".join(str(error).split())
    return redact_tokens(f"{type(error).__name__}: {message}" if message else type(error).__name__, *tokens)


# ---- Access tokens ---------------------------------------------------------------------------------------------------


def find_tokens(*further: Any) -> list[str]:
    tokens = [*further, *(os.environ.get(name) for name in TOKEN_VARIABLES)]
    # An error here occurs again, with an explanation, when the client signs in.
    with contextlib.suppress(Exception):
        from huggingface_hub import get_token

        tokens.append(get_token())
    return list(dict.fromkeys(token.strip() for token in tokens if isinstance(token, str) and token.strip()))


def redact_tokens(text: str, *further: Any) -> str:
    """Mask the access tokens of this process, further tokens, and strings that look like tokens."""
    for token in find_tokens(*further):
        text = text.replace(token, mask_secret("hub_token"))
    redacted: str = redact_secrets(HUB_TOKEN.sub(mask_secret("hub_token"), text))
    return redacted


def contains_token(text: str, *further: Any) -> bool:
    return HUB_TOKEN.search(text) is not None or any(token in text for token in find_tokens(*further))


def remove_files_with_tokens(folder: Path, *further: Any) -> None:
    secrets = [token.encode() for token in find_tokens(*further)]
    for path in filter(Path.is_file, sorted(folder.rglob("*"))):
        with path.open("rb") as file:
            content = file.read(MAX_SEARCHED_BYTES)
        if any(secret in content for secret in secrets):
            path.unlink()
            logger.warning("%s is not pushed to the Hub: an access token is in it.", path.relative_to(folder))
