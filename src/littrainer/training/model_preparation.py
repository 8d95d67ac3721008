"""What is done to the model for the length of one training, in the order in which it is done."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from littrainer.arguments.choices import DebugOption
from littrainer.ecosystem import is_a
from littrainer.model_wrapping import move_to_device
from littrainer.training.fused_kernels import apply_liger_kernels
from littrainer.training.neftune import noisy_embeddings
from littrainer.training.overflow_detection import DebugUnderflowOverflow
from littrainer.training.special_tokens import align_special_tokens

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

# What torch.utils.checkpoint.checkpoint takes besides the function and its arguments.
CHECKPOINT_KEYWORDS = {"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"}
# Keys of activation_checkpointing_kwargs that are the model's to carry out, with their defaults.
LAYER_CHOICES: dict[str, Any] = {"every_n_layers": 1, "offload": False}


class HasModelAndArguments(Protocol):
    """What has a model, and training arguments that say what is done to it; a Trainer is one."""

    model: Any
    args: Any


@contextmanager
def model_prepared_for_training(trainer: Trainer) -> Iterator[None]:
    """Prepare the model as the arguments ask; hooks are removed when the block ends, however it ends.

    Raises:
        ImportError: a library that an argument needs is not installed.
        ValueError: the model lacks what an argument needs.
    """
    apply_liger_kernels(trainer)
    casts_to_evaluate = trainer.args.fp16_full_eval or trainer.args.bf16_full_eval
    if casts_to_evaluate and trainer.model_init is None and not (trainer.is_fsdp_enabled or trainer.is_model_parallel):
        # So far it was left where it is, to be cast by an evaluation.
        trainer._move_model_to_device(trainer.model, trainer.args.device)
    move_to_device(trainer)
    enable_activation_checkpointing(trainer)
    align_special_tokens(trainer.model, trainer.processing_class)
    noise = noisy_embeddings(trainer.model, trainer.neftune_noise_alpha)
    with noise as trainer.neftune_hook_handle, _watched_for_overflow(trainer):
        yield


def enable_activation_checkpointing(trainer: HasModelAndArguments) -> None:
    """Let the model recompute activations in the backward pass, where the arguments ask for it.

    `every_n_layers` and `offload` among the keywords are the model's to carry out, the others go to
    `torch.utils.checkpoint`.

    Raises:
        ValueError: the model cannot do so.
    """
    if not trainer.args.activation_checkpointing:
        return
    given: Any = trainer.args.activation_checkpointing_kwargs
    keywords = dict(given or {})
    choices = {name: keywords.pop(name, default) for name, default in LAYER_CHOICES.items()}
    model = trainer.model
    unknown = sorted(set(keywords) - CHECKPOINT_KEYWORDS) if is_a(model, "pretrained model") else []
    if unknown:
        raise ValueError(
            f"activation_checkpointing_kwargs (or gradient_checkpointing_kwargs) has {', '.join(map(repr, unknown))}; "
            f"torch.utils.checkpoint takes {', '.join(sorted(CHECKPOINT_KEYWORDS))}."
        )
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=keywords or None, **choices)
    elif hasattr(model, "gradient_checkpointing_enable"):
        _enable_by_old_name(model, keywords, choices)
    else:
        raise ValueError(
            f"activation_checkpointing=True (or gradient_checkpointing=True) asks {type(model).__name__} to recompute "
            "activations, and it has no method activation_checkpointing_enable(). Give it one, or leave the argument "
            "unset."
        )


def _enable_by_old_name(model: Any, keywords: dict[str, Any], choices: dict[str, Any]) -> None:
    if not is_a(model, "pretrained model"):
        warnings.warn(
            f"{type(model).__name__} only has gradient_checkpointing_enable(), the old name of "
            "activation_checkpointing_enable(). Define the new one.",
            FutureWarning,
            stacklevel=2,
        )
    parameters = inspect.signature(model.gradient_checkpointing_enable).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    taken = {name: value for name, value in choices.items() if takes_any or name in parameters}
    lost = [
        f"{name}={value!r}" for name, value in choices.items() if name not in taken and value != LAYER_CHOICES[name]
    ]
    if lost:
        raise ValueError(
            f"activation_checkpointing_kwargs asks for {', '.join(lost)}, which gradient_checkpointing_enable() of "
            f"{type(model).__name__} does not take. Leave that out, or use a model that takes it."
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=keywords or None, **taken)


@contextmanager
def _watched_for_overflow(trainer: Trainer) -> Iterator[None]:
    if DebugOption.UNDERFLOW_OVERFLOW not in trainer.args.debug:
        yield
        return
    watch = DebugUnderflowOverflow(trainer.model)
    try:
        yield
    finally:
        watch.remove()
