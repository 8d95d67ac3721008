"""Arguments that are left to the lightning.Trainer, and telling of those that ask for something else."""

from __future__ import annotations

from typing import Any


def tell_unheeded(args: Any, trainer: Any) -> None:
    """Stand-in."""
