"""How a strategy ends whose model stays on its device."""

from __future__ import annotations

from typing import Any


def release_plugins(strategy: Any) -> None:
    """Let a strategy's plugins go, and leave model and optimizer where they are."""
    strategy.precision_plugin.teardown()
    if strategy.accelerator is not None:
        strategy.accelerator.teardown()
    strategy.checkpoint_io.teardown()
