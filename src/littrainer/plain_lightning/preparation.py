"""What is done to a module's model for the length of one training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from littrainer.training.fused_kernels import apply_liger_kernels
from littrainer.training.model_preparation import enable_activation_checkpointing
from littrainer.training.neftune import noisy_embeddings
from littrainer.training.special_tokens import align_special_tokens

if TYPE_CHECKING:
    from littrainer.plain_lightning.module import TransformersModule


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
