"""Fixture that replaces DeepSpeed, which is rarely installed, by a stand-in for a single process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from littrainer.distributed.group import SINGLE_PROCESS_VARIABLES

STAND_IN = Path(__file__).parent / "stand_in"


def unload_deepspeed() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the stand-in, imported as `deepspeed`."""
    import lightning.pytorch.strategies.deepspeed as lightning_module

    for name in ("_DEEPSPEED_AVAILABLE", "_DEEPSPEED_GREATER_EQUAL_0_16"):
        monkeypatch.setattr(lightning_module, name, True)
    for name in SINGLE_PROCESS_VARIABLES:
        # Restored after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    unload_deepspeed()
    monkeypatch.syspath_prepend(str(STAND_IN))
    import deepspeed

    yield deepspeed
    unload_deepspeed()
    if dist.is_initialized():
        dist.destroy_process_group()
    accelerate_state = sys.modules.get("accelerate.state")
    if accelerate_state is not None:
        accelerate_state.AcceleratorState._reset_state(reset_partial_state=True)
