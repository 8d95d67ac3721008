"""Batches in a form that can be compared, whatever library made them."""

from __future__ import annotations

from typing import Any


def described(batch: dict[str, Any]) -> dict[str, tuple[str, str, list[Any]]]:
    """Each entry as type, dtype and values, which can be compared whatever the library."""
    return {name: (type(value).__name__, str(value.dtype), value.tolist()) for name, value in batch.items()}
