"""DeepSpeed's logger and the marking of leaf modules."""

from __future__ import annotations

from typing import Any

from .logging import logger  # noqa: F401

LEAVES: list[Any] = []


def set_z3_leaf_modules(model: Any, classes: list[type]) -> None:
    """Record the classes that are gathered as units."""
    LEAVES.append((model, classes))
