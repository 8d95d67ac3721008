"""Where DeepSpeed has its logger and the marking of leaves."""

from __future__ import annotations

from typing import Any

from .logging import logger  # noqa: F401

LEAVES: list[Any] = []


def set_z3_leaf_modules(model: Any, classes: list[type]) -> None:
    """Note which classes are gathered as a whole."""
    LEAVES.append((model, classes))
