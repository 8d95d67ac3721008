"""Which arguments hold a secret that must not leave the process."""

from __future__ import annotations

# Endings of the names of arguments that hold secrets, and names that end so and hold parts of a vocabulary.
SECRET_ENDINGS = ("_token", "api_key", "_secret", "password")
VOCABULARY_TOKENS = tuple(f"{kind}_token" for kind in ("bos", "cls", "eos", "image", "mask", "pad", "sep", "unk"))


def holds_a_secret(name: str) -> bool:
    """Whether the argument of this name holds an access token, a key or a password."""
    return name.endswith(SECRET_ENDINGS) and not name.endswith(VOCABULARY_TOKENS)
