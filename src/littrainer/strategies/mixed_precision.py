"""Mixed precision: the model's forward runs under autocast and returns float32, for losses in float32."""

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

AUTOCAST_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
HALF_TYPES = (torch.float16, torch.bfloat16)


def get_autocast_dtype(args: Any) -> torch.dtype | None:
    """Return None without autocast, and with DeepSpeed."""
    return None if has_deepspeed(args) else AUTOCAST_DTYPES.get(get_lightning_precision(args))


def autocast_forward(model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """Run a model's forward under autocast, with float32 outputs, until `restore_forward`.

    Training does not restore it, so that later computations of a script match.
    """
    if "_original_forward" in vars(model):
        return
    forward: Any = model.forward
    function = getattr(forward, "__func__", None)
    if function is None:
        model._original_forward, model.forward = forward, _wrap_in_autocast(forward, device_type, dtype)
    else:
        # Bound weakly, so that a copy of the model calls its own forward.
        original: Any = WeaklyBound(function, model)
        in_half: Any = WeaklyBound(_wrap_in_autocast(function, device_type, dtype), model)
        model._original_forward, model.forward = original, in_half


def restore_forward(model: nn.Module) -> None:
    original: Any = vars(model).pop("_original_forward", None)
    if original is not None:
        model.forward = original


def _wrap_in_autocast(forward: Callable[..., Any], device_type: str, dtype: torch.dtype) -> Callable[..., Any]:
    @functools.wraps(forward)
    def forward_in_half_precision(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype=dtype):
            outputs = forward(*args, **kwargs)
        return map_nested(_convert_to_float32, outputs)

    return forward_in_half_precision


def _convert_to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALF_TYPES else value
