"""What an error of the Hub means to who trains, and no token in any text of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from littrainer.hub.silence import SilentHubError
from littrainer.hub.tokens import shows_token, without_tokens

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
NO_ANSWER = "The Hub was not reached, or the connection was cut; look at the network, and at HF_ENDPOINT."
SILENT = "The Hub was silent ({}); look at the network, and at HF_ENDPOINT."
# Where a class has one of these in its name, there was no answer.
OF_CONNECTIONS = ("Connect", "Timeout", "Network", "Protocol", "ReadError", "WriteError", "Offline")


class PushError(RuntimeError):
    """What was to be pushed to the Hub is not there."""


def advice_for(error: BaseException) -> str:
    """What to do about an error of a push; empty where its text has to do."""
    for link in causes(error):
        if isinstance(link, SilentHubError):
            return SILENT.format(link)
        status = _status_of(link)
        if status is not None:
            return SERVER_FAILS if status >= 500 else ADVICE.get(status, "")
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


def _status_of(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def text_of(error: BaseException, *tokens: Any) -> str:
    """Kind and words of an error in one line, without any token: none of these, and none of who is logged in."""
    words = " ".join(part for part in str(error).split() if part)
    return without_tokens(f"{type(error).__name__}: {words}" if words else type(error).__name__, *tokens)


def tells(error: BaseException, *tokens: Any) -> bool:
    """Whether a traceback of the error would show a token: one of these, one of who is logged in, or a like one."""
    shown = "\n".join(f"{link!s}{link!r}{getattr(link, '__notes__', '')}" for link in causes(error))
    return shows_token(shown, *tokens)


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and what it came from."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
