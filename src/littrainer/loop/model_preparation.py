"""Preparation of the model for a training."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from littrainer.arguments.choices import DebugOption
from littrainer.model.facts import base_model
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.strategies.model_wrapping import move_to_device

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.trainer_context import TrainerContext

logger = logging.getLogger(__name__)

# Keywords of torch.utils.checkpoint.checkpoint.
CHECKPOINT_KEYWORDS = {"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"}
# Keys of activation_checkpointing_kwargs for the model, with defaults.
LAYER_OPTIONS: dict[str, Any] = {"every_n_layers": 1, "offload": False}


@contextmanager
def prepare_model_for_training(trainer: TrainerContext) -> Iterator[None]:
    """Prepare the model, with NEFTune's noise until the end of the block."""
    apply_liger_kernels(trainer.model, trainer.args)
    move_to_device(trainer.model, trainer.args)
    enable_activation_checkpointing(trainer.model, trainer.args)
    align_special_tokens(trainer.model, trainer.processing_class)
    detect_overflow(trainer.model, trainer.args)
    with add_embedding_noise(trainer.model, trainer.neftune_noise_alpha) as trainer.session.neftune_hook_handle:
        yield


def enable_activation_checkpointing(model: Any, args: TrainingArguments) -> None:
    """Apply `activation_checkpointing`; its keywords except `LAYER_OPTIONS` are for `torch.utils.checkpoint`."""
    if not args.activation_checkpointing:
        return
    keywords: dict[str, Any] = dict(args.activation_checkpointing_kwargs or {})  # type: ignore[arg-type]
    options = {name: keywords.pop(name, default) for name, default in LAYER_OPTIONS.items()}
    unknown = sorted(set(keywords) - CHECKPOINT_KEYWORDS) if is_a(model, "pretrained model") else []
    if unknown:
        raise ValueError(
            f"activation_checkpointing_kwargs (or gradient_checkpointing_kwargs) has {', '.join(map(repr, unknown))}; "
            f"torch.utils.checkpoint takes {', '.join(sorted(CHECKPOINT_KEYWORDS))}."
        )
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=keywords or None, **options)
    elif hasattr(model, "gradient_checkpointing_enable"):
        _enable_by_old_name(model, keywords, options)
    else:
        raise ValueError(
            f"activation_checkpointing=True (or gradient_checkpointing=True) asks {type(model).__name__} to recompute "
            "activations, and it has no method activation_checkpointing_enable(). Give it one, or leave the argument "
            "unset."
        )


def _enable_by_old_name(model: Any, keywords: dict[str, Any], options: dict[str, Any]) -> None:
    if not is_a(model, "pretrained model"):
        warnings.warn(
            f"{type(model).__name__} only has gradient_checkpointing_enable(), the old name of "
            "activation_checkpointing_enable(). Define the new one.",
            FutureWarning,
            stacklevel=2,
        )
    parameters = inspect.signature(model.gradient_checkpointing_enable).parameters
    has_kwargs = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    accepted = {name: value for name, value in options.items() if has_kwargs or name in parameters}
    rejected = [
        f"{name}={value!r}" for name, value in options.items() if name not in accepted and value != LAYER_OPTIONS[name]
    ]
    if rejected:
        raise ValueError(
            f"activation_checkpointing_kwargs asks for {', '.join(rejected)}, which gradient_checkpointing_enable() of "
            f"{type(model).__name__} does not take. Leave that out, or use a model that takes it."
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=keywords or None, **accepted)


def detect_overflow(model: nn.Module, args: TrainingArguments) -> None:
    """Register hooks that end the training at the first non-finite number, if `debug` is set."""
    if DebugOption.UNDERFLOW_OVERFLOW not in args.debug:
        return
    try:
        from transformers.debug_utils import DebugUnderflowOverflow
    except ImportError as error:
        raise ImportError(
            "debug='underflow_overflow' takes transformers, whose DebugUnderflowOverflow watches the model: install it "
            "with `pip install transformers`, or leave debug unset."
        ) from error
    DebugUnderflowOverflow(model)


@contextmanager
def add_embedding_noise(model: nn.Module, alpha: float | None) -> Iterator[Any]:
    """Add noise to input embeddings in training mode, within a block."""
    if alpha is None:
        yield None
        return
    embeddings: Any = _input_embeddings(model, alpha)
    embeddings.neftune_noise_alpha = alpha
    handle = embeddings.register_forward_hook(_add_noise)
    try:
        yield handle
    finally:
        handle.remove()
        del embeddings.neftune_noise_alpha


def _input_embeddings(model: nn.Module, alpha: float) -> nn.Module:
    find = getattr(base_model(model), "get_input_embeddings", None)
    if not callable(find):
        raise ValueError(
            f"neftune_noise_alpha={alpha} adds noise to the input embeddings, and {type(model).__name__} does not say "
            "which module they are: give it a method get_input_embeddings(), or leave neftune_noise_alpha unset."
        )
    return find()


def _add_noise(embeddings: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    if not embeddings.training:
        return output
    # A tensor, whose square root rounds as in transformers.
    width = torch.tensor(output.size(1) * output.size(2))
    bound = embeddings.neftune_noise_alpha / torch.sqrt(width)
    return output + torch.zeros_like(output).uniform_(-bound, bound)


def apply_liger_kernels(model: Any, args: TrainingArguments) -> None:
    if not args.use_liger_kernel:
        return
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError as error:
        raise ImportError(
            "use_liger_kernel=True takes the package liger-kernel (0.3.0 or newer): install it with "
            "`pip install liger-kernel`, or set use_liger_kernel=False."
        ) from error
    model = base_model(model)
    if is_a(model, "pretrained model"):
        _apply_liger_kernel_to_instance(model=model, **(args.liger_kernel_config or {}))
    else:
        logger.warning(
            "use_liger_kernel=True changes nothing: Liger has kernels for models of transformers, and %s is none.",
            type(model).__name__,
        )


# Token id -> whether a config may have several, any of which ends a generation.
SPECIAL_TOKENS = {"eos_token_id": True, "bos_token_id": False, "pad_token_id": False}


def align_special_tokens(model: Any, processing_class: Any) -> None:
    """Write the tokenizer's special token ids into the model's config and generation config.

    An end-of-sequence id is added to a list of ids, so that no token that ends a generation is lost.
    """
    if processing_class is None or not hasattr(model, "config"):
        return
    if is_a(processing_class, "processor"):
        tokenizer = processing_class.tokenizer
    elif is_a(processing_class, "tokenizer"):
        tokenizer = processing_class
    else:
        return
    config = model.config.get_text_config()
    generation_config = getattr(model, "generation_config", None)
    changed: dict[str, int] = {}
    for name, may_be_several in SPECIAL_TOKENS.items():
        token_id = getattr(tokenizer, name)
        if token_id is None:
            continue
        config_ids = _get_ids(config, name)
        generation_ids = None if generation_config is None else _get_ids(generation_config, name)
        if token_id in config_ids and (generation_ids is None or token_id in generation_ids):
            continue
        changed[name] = token_id
        is_list = may_be_several and isinstance(getattr(config, name, None), list)
        setattr(config, name, _prepend(token_id, config_ids) if is_list else token_id)
        if generation_ids is not None:
            setattr(generation_config, name, _prepend(token_id, generation_ids) if may_be_several else token_id)
    if changed:
        logger.warning(
            "The tokenizer's special tokens differ from the model's; its config and generation config now have %s.",
            changed,
        )


def _get_ids(config: Any, name: str) -> list[int]:
    value = getattr(config, name, None)
    return [token_id for token_id in (value if isinstance(value, list) else [value]) if token_id is not None]


def _prepend(token_id: int, ids: list[int]) -> list[int]:
    return [token_id, *(other_id for other_id in ids if other_id != token_id)]
