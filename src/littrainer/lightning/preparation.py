"""What is done to a module's model for the length of one training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from littrainer.ecosystem import is_a
from littrainer.training.fused_kernels import apply_liger_kernels
from littrainer.training.model_preparation import enable_activation_checkpointing
from littrainer.training.neftune import noisy_embeddings
from littrainer.training.special_tokens import align_special_tokens

if TYPE_CHECKING:
    from littrainer.lightning.module import TransformersModule


def put_into_training_mode(model: nn.Module, is_whole: bool = True) -> None:
    """Put a model into training mode if it is in evaluation mode, and each model of transformers within it.

    `from_pretrained` leaves a model in evaluation mode. What is so within a model in training mode, its user wants so.
    """
    is_loaded = is_a(model, "model of transformers")
    if not model.training and (is_whole or is_loaded):
        model.train()
    elif not is_loaded:
        for part in model.children():
            put_into_training_mode(part, is_whole=False)


@contextmanager
def prepared_for_training(module: TransformersModule) -> Iterator[None]:
    """Prepare the model as the arguments ask, in the order in which a Trainer does it; hooks go when the block ends.

    Raises:
        ImportError: a library that an argument needs is not installed.
        ValueError: the model lacks what an argument needs.
    """
    apply_liger_kernels(module)
    enable_activation_checkpointing(module)
    align_special_tokens(module.model, module.processing_class)
    with noisy_embeddings(module.model, module.args.neftune_noise_alpha):
        yield
