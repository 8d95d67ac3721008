"""Making the model's configs agree with the tokenizer on its special tokens before training."""

from __future__ import annotations

import logging
from typing import Any

from littrainer.ecosystem import is_a

logger = logging.getLogger(__name__)

# Name of the token id, and whether a config may hold several of them, any of which ends a generation.
SPECIAL_TOKENS = {"eos_token_id": True, "bos_token_id": False, "pad_token_id": False}


def align_special_tokens(model: Any, processing_class: Any) -> None:
    """Write the tokenizer's special token ids into the model's config and generation config.

    Only ids that the tokenizer defines are written, and an end-of-sequence id is added to a list of them rather than
    put in its place, so that no token that ends a generation is lost. Anything but a tokenizer or a processor around
    one, or a model without a config, is left alone.
    """
    if is_a(processing_class, "processor"):
        tokenizer = processing_class.tokenizer
    elif is_a(processing_class, "tokenizer"):
        tokenizer = processing_class
    else:
        return
    if not hasattr(model, "config"):
        return
    config = model.config.get_text_config()
    generation_config = getattr(model, "generation_config", None)
    changed: dict[str, int] = {}
    for name, may_be_several in SPECIAL_TOKENS.items():
        token_id = getattr(tokenizer, name)
        if token_id is None:
            continue
        in_config = _ids(config, name)
        in_generation_config = None if generation_config is None else _ids(generation_config, name)
        if token_id in in_config and (in_generation_config is None or token_id in in_generation_config):
            continue
        changed[name] = token_id
        keeps_list = may_be_several and isinstance(getattr(config, name, None), list)
        setattr(config, name, _with_first(token_id, in_config) if keeps_list else token_id)
        if in_generation_config is not None:
            value = _with_first(token_id, in_generation_config) if may_be_several else token_id
            setattr(generation_config, name, value)
    if changed:
        logger.warning(
            "The tokenizer's special tokens differ from the model's; its config and generation config now have %s.",
            changed,
        )


def _ids(config: Any, name: str) -> list[int]:
    value = getattr(config, name, None)
    return [one for one in (value if isinstance(value, list) else [value]) if one is not None]


def _with_first(token_id: int, ids: list[int]) -> list[int]:
    return [token_id, *(one for one in ids if one != token_id)]
