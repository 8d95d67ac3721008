"""Noise on the input embeddings during training (NEFTune, Jain et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from littrainer.model_facts import base_model


@contextmanager
def noisy_embeddings(model: nn.Module, alpha: float | None) -> Iterator[Any]:
    """Add noise to what the model's input embeddings return in training mode, for the length of a block.

    Parameters:
        alpha: strength of the noise; None adds none.

    Raises:
        ValueError: the model does not say which of its modules embeds the input.
    """
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
    # Of a row's length, so that long rows are not drowned in noise. A tensor's square root, whose rounding decides the
    # last bit.
    width = torch.tensor(output.size(1) * output.size(2))
    bound = embeddings.neftune_noise_alpha / torch.sqrt(width)
    return output + torch.zeros_like(output).uniform_(-bound, bound)
