"""Liger's fused Triton kernels in the place of a model's layers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from littrainer.ecosystem import is_a
from littrainer.model_facts import base_model

if TYPE_CHECKING:
    from littrainer.training.model_preparation import HasModelAndArguments

logger = logging.getLogger(__name__)


def apply_liger_kernels(trainer: HasModelAndArguments) -> None:
    """Replace the layers of the Trainer's model that Liger has kernels for, as `liger_kernel_config` selects.

    A model that is none of transformers' is left as it is, with a warning.

    Raises:
        ImportError: liger-kernel is not installed.
    """
    if not trainer.args.use_liger_kernel:
        return
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError as error:
        raise ImportError(
            "use_liger_kernel=True takes the package liger-kernel (0.3.0 or newer): install it with "
            "`pip install liger-kernel`, or set use_liger_kernel=False."
        ) from error
    model = base_model(trainer.model)
    if is_a(model, "pretrained model"):
        _apply_liger_kernel_to_instance(model=model, **(trainer.args.liger_kernel_config or {}))
    else:
        logger.warning(
            "use_liger_kernel=True changes nothing: Liger has kernels for models of transformers, and %s is none.",
            type(model).__name__,
        )
