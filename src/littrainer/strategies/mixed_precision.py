"""Mixed precision of a Trainer: the model's forward runs in half precision and returns float32.

What a Trainer computes from the outputs, such as the loss of a `compute_loss_func`, stays in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from littrainer.arguments.deepspeed import has_deepspeed
from littrainer.arguments.destinations import get_lightning_precision
from littrainer.runtime.nested_values import map_nested
from littrainer.runtime.weak_attributes import WeaklyBound

# Lightning's precision -> what the forward pass computes in.
AUTOCAST_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
HALF_TYPES = (torch.float16, torch.bfloat16)


def get_autocast_dtype(args: Any) -> torch.dtype | None:
    """What the forward pass computes in under autocast; None for the model's own precision, as under DeepSpeed."""
    if has_deepspeed(args):
        return None
    return AUTOCAST_DTYPES.get(get_lightning_precision(args))


def autocast_forward(model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """From now on, run a model's forward under autocast and return its half precision outputs in float32.

    It stays that way after training, so that what a script computes with the model afterwards agrees with it. Nothing
    changes for a model that runs that way already.
    """
    if "_original_forward" in vars(model):
        return
    forward: Any = model.forward
    function = getattr(forward, "__func__", None)
    if function is None:
        model._original_forward, model.forward = forward, _under_autocast(forward, device_type, dtype)
    else:
        # Bound to the model, so that a copy of it gets its own forward.
        original: Any = WeaklyBound(function, model)
        in_half: Any = WeaklyBound(_under_autocast(function, device_type, dtype), model)
        model._original_forward, model.forward = original, in_half


def restore_forward(model: nn.Module) -> None:
    """Undo `autocast_forward`."""
    found: Any = vars(model).pop("_original_forward", None)
    if found is not None:
        model.forward = found


def _under_autocast(forward: Callable[..., Any], device_type: str, dtype: torch.dtype) -> Callable[..., Any]:
    @functools.wraps(forward)
    def forward_in_half_precision(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype=dtype):
            outputs = forward(*args, **kwargs)
        return map_nested(_in_float32, outputs)

    return forward_in_half_precision


def _in_float32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALF_TYPES else value
