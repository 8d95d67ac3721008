"""Redaction of tokens, keys and passwords."""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

# In lower case, with `_` for any separator.
SECRET_NAMES = frozenset({"authorization", "credential", "credentials", "secret", "token"})
SECRET_ENDINGS = (
    *("_token", "accesstoken", "authtoken", "_secret", "_credential", "_credentials", "connection_string"),
    *("password", "passwd", "passphrase", "_pwd", "apikey"),
    *(f"{kind}_key" for kind in ("access", "account", "api", "auth", "private", "secret", "subscription")),
    *(f"{service}_key" for service in ("anthropic", "aws", "azure", "clearml", "comet", "hf", "openai", "wandb")),
)
# Tokens of a vocabulary, and counts.
NOT_SECRET_ENDINGS = tuple(
    f"{kind}_token"
    for kind in (
        *("bos", "cls", "eos", "mask", "pad", "sep", "unk", "eot", "eod", "special"),
        *("audio", "image", "video", "vision", "boi", "eoi", "boa", "eoa"),
        *("assistant", "system", "user", "start", "end", "stop", "stopping", "prefix", "suffix", "middle", "fill"),
        *("first", "last", "next", "new", "single", "per"),
    )
)
CAMEL_CASE_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
SEPARATORS = re.compile(r"[^a-z0-9]+")
# `user:password@` in any URL, `user@` or `token@` in http URLs.
URL_CREDENTIALS = re.compile(r"://[^\s/?#@:]*:[^\s/?#]*@|(?<=http)(s?)://[^\s/?#@:]+@", re.IGNORECASE)
# Tokens by their first letters.
TOKEN = re.compile(r"\b(?:hf_|sk-|ghp_)[A-Za-z0-9_-]{16,}")
# Name before "=" at the start of a word, or after such a name, as in `--env=TOKEN=value`.
OPTION = re.compile(r"(?:(?<=^)|(?<==))(?P<name>[\w.-]+)=")
# Value after a name, in JSON or a header.
NAMED_VALUE = re.compile(r"""(?P<name>[\w.-]+)(?P<separator>["']?\s*:\s*["']?)(?:Bearer\s+)?[^"',\s}]+""")


@functools.cache
def is_secret_name(name: str) -> bool:
    plain = SEPARATORS.sub("_", CAMEL_CASE_BOUNDARY.sub("_", name).lower())
    if plain.endswith(NOT_SECRET_ENDINGS):
        return False
    return plain in SECRET_NAMES or plain.endswith(SECRET_ENDINGS)


def redact_command(words: Sequence[str]) -> list[str]:
    """Mask the values of options with secret names, and remove credentials in URLs."""
    redacted = []
    for previous, word in itertools.pairwise(["", *words]):
        if previous.startswith("-") and is_secret_name(previous.lstrip("-")):
            word = mask_secret(previous.lstrip("-"))
        for option in OPTION.finditer(word):
            if is_secret_name(name := option["name"].lstrip("-")):
                # The value is all that follows, since it may have any character.
                word = f"{word[: option.end()]}{mask_secret(name)}"
                break
        word = TOKEN.sub("<TOKEN>", NAMED_VALUE.sub(_redact_named_value, word))
        redacted.append(URL_CREDENTIALS.sub(r"\1://", word))
    return redacted


def _redact_named_value(match: re.Match[str]) -> str:
    name = match["name"].lstrip("-")
    return f"{match['name']}{match['separator']}{mask_secret(name)}" if is_secret_name(name) else match[0]


def mask_secret(name: str) -> str:
    return f"<{name.upper()}>"


def redact_secrets(value: Any, mask: Callable[[str], Any] = mask_secret) -> Any:
    """Mask nested secrets and remove credentials in URLs; without secrets return the value itself."""
    if isinstance(value, str):
        text = URL_CREDENTIALS.sub(r"\1://", value)
        return value if text == value else text
    if isinstance(value, dict):
        changed = {}
        for key, item in value.items():
            # `token=True` means the stored token.
            if item is None or isinstance(item, bool) or item == "":
                continue
            if isinstance(key, str) and is_secret_name(key):
                changed[key] = mask(key)
            elif isinstance(item, str) and "://" not in item:
                continue
            elif isinstance(item, (str, dict, list, tuple)) and (shown := redact_secrets(item, mask)) is not item:
                changed[key] = shown
        return {**value, **changed} if changed else value
    if isinstance(value, (list, tuple)) and value:
        items = [redact_secrets(item, mask) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        return items if isinstance(value, list) else tuple(items)
    return value
