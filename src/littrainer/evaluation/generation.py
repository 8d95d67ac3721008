"""Generated predictions: settings, and tokens and labels of a batch."""

from __future__ import annotations

import copy
import functools
import importlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from littrainer.arguments.fields import GenerationConfig
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.runtime.nested_values import PADDING
from littrainer.runtime.notes import kind_of

logger = logging.getLogger(__name__)

# Keywords for which None means the model's generation config.
OPTIONAL_KEYWORDS = ("max_length", "num_beams")
# Created by collators from labels, and removed before generation.
DERIVED_FROM_LABELS = ("decoder_input_ids", "decoder_attention_mask")


def is_generation_requested(args: Any) -> bool:
    return bool(getattr(args, "predict_with_generate", False)) and not args.prediction_loss_only


def prepare(args: Any, model: nn.Module, generates: bool) -> None:
    """Set a model's generation config from the arguments, and check that the model can generate if required.

    Parameters:
        generates: with `predict_with_generate`, the model has to be able to generate.
    """
    source = getattr(args, "generation_config", None)
    if source is not None:
        config: Any = load_config(source)
        model.generation_config = config
    if getattr(args, "predict_with_generate", False) and generates:
        check_can_generate(model)


def check_can_generate(model: nn.Module) -> None:
    for name in ("generate", "generation_config"):
        if getattr(model, name, None) is None:
            raise ValueError(
                f"predict_with_generate=True needs a model that can generate, and {type(model).__name__} has no "
                f"`{name}`. Load it with a language modeling head (AutoModelForSeq2SeqLM, AutoModelForCausalLM), or "
                "leave predict_with_generate off."
            )


# ---- Settings --------------------------------------------------------------------------------------------------------


def load_config(source: Any) -> Any:
    """Return a validated copy of a generation config.

    Parameters:
        source: a generation config, a file, a folder with a generation_config.json, or a model id.
    """
    if isinstance(source, (str, os.PathLike)):
        name = f"generation_config={os.fspath(source)!r}"
        config = _read_config(source, name)
    elif isinstance(source, GenerationConfig):
        name = "generation_config"
        config = copy.deepcopy(source)
    else:
        raise TypeError(f"generation_config is {kind_of(source)}; give {CONFIG_SOURCES_HINT}.")
    try:
        # `save_pretrained` would fail with the same error after the training.
        config.validate(strict=True)
    except ValueError as error:
        raise ValueError(
            f"{name} is not valid, and the model could not be saved with it; change it. {error}"
        ) from error
    return config


CONFIG_SOURCES_HINT = "a GenerationConfig, the path of a file or of a folder that holds one, or a model id"


def _read_config(source: str | os.PathLike[str], name: str) -> Any:
    path = Path(source)
    location = (path.parent, path.name) if path.is_file() else (source, None)
    try:
        return importlib.import_module("transformers").GenerationConfig.from_pretrained(*location)
    except ImportError as error:
        raise ImportError(
            f"{name} is read by transformers, which is not installed: pip install transformers."
        ) from error
    except OSError as error:
        raise OSError(f"{name} cannot be read: {error} Give {CONFIG_SOURCES_HINT}.") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} is not valid: {error}") from error


def merge_generation_keywords(args: Any, call_keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's keywords, with `generation_max_length` and `generation_num_beams` in place of None."""
    keywords = dict(call_keywords)
    length, beams = (getattr(args, name, None) for name in ("generation_max_length", "generation_num_beams"))
    if length is not None and keywords.get("max_length") is None and keywords.get("max_new_tokens") is None:
        keywords["max_length"] = length
    if beams is not None and keywords.get("num_beams") is None:
        keywords["num_beams"] = beams
    return keywords


@functools.cache
def log_unused_keywords(idle: str) -> None:
    logger.info("%s: without effect, since predict_with_generate is not set.", idle)


def needs_synced_gpus(model: nn.Module, world_size: int) -> bool:
    """Return whether forward passes all-gather sharded parameters."""
    if world_size == 1:
        return False
    has_zero3 = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    return has_zero3 or any(is_a(module, "sharded module") for module in model.modules())


# ---- One batch -------------------------------------------------------------------------------------------------------


def generate_tokens(
    model: Any, inputs: Mapping[str, Any], gen_kwargs: Mapping[str, Any], world_size: int, processing_class: Any
) -> torch.Tensor:
    """Return the generated tokens, without the prompts of a decoder-only model."""
    if is_decoder_only(model):
        inputs = extract_prompts(inputs, lambda: find_padding_token(model, processing_class))
    keywords = {name: value for name, value in gen_kwargs.items() if value is not None or name not in OPTIONAL_KEYWORDS}
    keywords.setdefault("synced_gpus", needs_synced_gpus(model, world_size))
    tokens = model.generate(**drop_answer_inputs(inputs), **keywords)
    # The result begins with the prompt, except for prompts as embeddings.
    return tokens[:, inputs["input_ids"].shape[1] :] if is_decoder_only(model) and "input_ids" in inputs else tokens


def is_decoder_only(model: Any) -> bool:
    return not getattr(getattr(model, "config", None), "is_encoder_decoder", True)


def pad_tokens_and_labels(
    model: Any,
    tokens: torch.Tensor,
    labels: torch.Tensor | None,
    pad: Callable[[torch.Tensor, int], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Pad tokens and labels to the maximum length in the model's generation config.

    Nothing is padded for a decoder-only model, whose maximum includes the prompt.
    """
    if is_decoder_only(model):
        return tokens, labels
    lengths = _get_max_lengths(model.generation_config)

    def pad_rows(rows: torch.Tensor) -> torch.Tensor:
        target = next((length for length in lengths if rows.shape[-1] < length), None)
        return rows if target is None else pad(rows, target)

    return pad_rows(tokens), None if labels is None else pad_rows(labels)


def drop_answer_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Drop decoder inputs that were derived from the labels."""
    labels, decoder_inputs = inputs.get("labels"), inputs.get("decoder_input_ids")
    dropped: tuple[str, ...] = ("labels",) if labels is None else ()
    if labels is not None and decoder_inputs is not None and labels.shape == decoder_inputs.shape:
        dropped = DERIVED_FROM_LABELS
    return {name: value for name, value in inputs.items() if name not in dropped}


def extract_prompts(inputs: Mapping[str, Any], padding: Callable[[], int]) -> Mapping[str, Any]:
    """Return a decoder-only model's batch, with rows cut before their labels and padded on the left.

    Rows are not cut if labels differ from tokens or leave no prompt.
    """
    ids, labels, mask = (inputs.get(name) for name in ("input_ids", "labels", "attention_mask"))
    parts = [part for part in (labels, mask) if part is not None]
    if ids is None or not parts or any(part.shape != ids.shape for part in parts):
        return inputs
    mask = torch.ones_like(ids) if mask is None else mask
    is_token = is_prompt = mask.bool()
    if labels is not None:
        is_label = labels != PADDING
        has_answer = (~is_label | (labels == ids)).all(-1, keepdim=True)
        is_prompt = is_token & ~(is_label.cumsum(-1).bool() & has_answer)
        is_prompt |= is_token & ~is_prompt.any(-1, keepdim=True)
    # Stable sort, which right-aligns the prompts.
    order = is_prompt.int().argsort(dim=-1, stable=True)[:, ids.shape[1] - int(is_prompt.sum(-1).max()) :]
    prompts = {name: value for name, value in inputs.items() if name != "labels"}
    for name, value in prompts.items():
        if getattr(value, "shape", None) == ids.shape:
            prompts[name] = value.gather(1, order)
    is_token = is_prompt.gather(1, order)
    if not is_token.all():
        prompts["input_ids"] = prompts["input_ids"].masked_fill(~is_token, padding())
    return {**prompts, "attention_mask": is_token.to(mask.dtype)}


def _get_max_lengths(config: Any) -> tuple[int, ...]:
    """Return `max_length`, and `max_new_tokens` + 1 (the start token)."""
    # With `_from_model_config`, `generate` would derive the settings from the model's config for each batch.
    if config._from_model_config:
        config._from_model_config = False
    config.update(**config._get_default_generation_params(), defaults_only=True)
    max_tokens = None if config.max_new_tokens is None else config.max_new_tokens + 1
    return tuple(length for length in (config.max_length, max_tokens) if length is not None)


def pad_to_length(tokens: torch.Tensor, length: int, padding: int) -> torch.Tensor:
    rows = tokens.new_full((tokens.shape[0], length), padding)
    rows[:, : tokens.shape[-1]] = tokens
    return rows


def find_padding_token(model: Any, processing_class: Any) -> int:
    if hasattr(processing_class, "pad_token_id"):
        ids = [processing_class.pad_token_id, getattr(processing_class, "eos_token_id", None)]
        setting = f"{type(processing_class).__name__}.pad_token_id"
    else:
        ids = [getattr(getattr(model, "config", None), "pad_token_id", None)]
        setting = "model.config.pad_token_id"
    padding = next((token for token in ids if token is not None), None)
    if padding is None:
        raise ValueError(f"Generated outputs differ in length and there is nothing to pad them with: set {setting}.")
    return padding
