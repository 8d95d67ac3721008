"""Access tokens to the Hub: which ones a run knows, and texts and files without any of them."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from littrainer.arguments.secrets import masked, without_secrets

logger = logging.getLogger(__name__)

TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
# What a token of the Hub looks like, whosever it is.
HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}\b")
# Files that can be as large as the memory, with tensors in all but their first part.
FILES_OF_TENSORS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.distcp")
# Of which so many bytes are searched, where names and pickled values stand.
SEARCHED_OF_TENSORS = 16 << 20
# Read at a time; a training runs beside the search, and waits while one such block is looked through.
BLOCK_BYTES = 1 << 20


def known_tokens(*given: Any) -> list[str]:
    """Tokens that the process could sign in with: those that are given, and those that are logged in.

    Parameters:
        given: tokens; what is no text is none.
    """
    found = [*given, *(os.environ.get(name) for name in TOKEN_VARIABLES)]
    # Where the client cannot find out who is logged in, an error of its own says so when it signs in.
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


def holds_secret(path: Path, secrets: tuple[bytes, ...]) -> bool:
    """Whether one of the secrets is in a file; of a large one of tensors, in its first part."""
    if not secrets:
        return False
    overlap = max(map(len, secrets)) - 1
    end = SEARCHED_OF_TENSORS if any(fnmatch(path.name, pattern) for pattern in FILES_OF_TENSORS) else None
    before, read = b"", 0
    with path.open("rb") as file:
        while (end is None or read < end) and (block := file.read(BLOCK_BYTES)):
            read += len(block)
            block = before + block
            if any(secret in block for secret in secrets):
                return True
            # A secret may begin in one block and end in the next one.
            before = block[-overlap:] if overlap else b""
    return False


def remove_files_with_secrets(folder: Path, secrets: tuple[bytes, ...], origins: tuple[Path, ...] = ()) -> None:
    """Remove each file with one of the secrets in it from a folder that is about to be pushed, with a warning.

    Parameters:
        origins: folders that the files were taken from, for the warning.
    """
    for path in list(_files_below(folder)):
        if holds_secret(path, secrets):
            path.unlink()
            name = path.relative_to(folder)
            warn_of_secret(next((origin / name for origin in origins if (origin / name).exists()), name))


def warn_of_secret(path: Path) -> None:
    """Say that a file is left out of a push."""
    logger.warning("%s is not pushed to the Hub: an access token is in it.", path)


def _files_below(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        for name in sorted(names):
            yield Path(parent, name)
