"""Nested values for tests, and what they hold in a form that compares."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def described(value: Any) -> Any:
    """Nested arrays or tensors as types, dtypes and values."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return type(value).__name__, str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return type(value).__name__, {name: described(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [described(item) for item in value]
    return value


def filled(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)
