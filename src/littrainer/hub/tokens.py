"""Access tokens to the Hub: which ones a run knows, and texts and files without any of them."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from pathlib import Path
from typing import Any

from littrainer.arguments.secrets import masked, without_secrets

logger = logging.getLogger(__name__)

TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
# What a token of the Hub looks like, whosever it is.
HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}\b")
# Of each file so many bytes are searched: names and pickled values stand before tensors.
SEARCHED_BYTES = 16 << 20


def known_tokens(*given: Any) -> list[str]:
    """Tokens that the process could sign in with: those that are given, and those that are logged in.

    Parameters:
        given: tokens; what is no text is none.
    """
    found = [*given, *(os.environ.get(name) for name in TOKEN_VARIABLES)]
    # If the client cannot find out who is logged in, its own error says so when it signs in.
    with contextlib.suppress(Exception):
        from huggingface_hub import get_token

        found.append(get_token())
    stripped = (token.strip() for token in found if isinstance(token, str))
    return list(dict.fromkeys(token for token in stripped if token))


def without_tokens(text: str, *given: Any) -> str:
    """A text without any of the tokens that are given or logged in, and without what looks like one."""
    for token in known_tokens(*given):
        text = text.replace(token, masked("hub_token"))
    plain: str = without_secrets(HUB_TOKEN.sub(masked("hub_token"), text))
    return plain


def shows_token(text: str, *given: Any) -> bool:
    """Whether one of the tokens, or what looks like one, is in a text."""
    return HUB_TOKEN.search(text) is not None or any(token in text for token in known_tokens(*given))


def secrets_of(*given: Any) -> tuple[bytes, ...]:
    """What must be in no file that is pushed: the tokens that are given, and those that are logged in."""
    return tuple(token.encode() for token in known_tokens(*given))


def remove_files_with_secrets(folder: Path, secrets: tuple[bytes, ...]) -> None:
    """Remove each file with one of the secrets in it from a folder that is about to be pushed, with a warning."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and _holds_secret(path, secrets):
            path.unlink()
            logger.warning("%s is not pushed to the Hub: an access token is in it.", path.relative_to(folder))


def _holds_secret(path: Path, secrets: tuple[bytes, ...]) -> bool:
    with path.open("rb") as file:
        content = file.read(SEARCHED_BYTES)
    return any(secret in content for secret in secrets)
