"""Where DeepSpeed has its logger and the marking of leaves."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("deepspeed stand-in")
LEAVES: list[Any] = []


def set_z3_leaf_modules(model: Any, classes: list[type]) -> None:
    """Note which classes are gathered as a whole."""
    LEAVES.append((model, classes))
