"""DeepSpeed is not installed where these tests run: a stand-in of one process takes its place."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from littrainer.distributed.group import ALONE

STAND_IN = Path(__file__).parent / "stand_in"


def forget_deepspeed() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in, imported as `deepspeed`."""
    import lightning.pytorch.strategies.deepspeed as lightnings

    for name in ("_DEEPSPEED_AVAILABLE", "_DEEPSPEED_GREATER_EQUAL_0_16"):
        monkeypatch.setattr(lightnings, name, True)
    for name in ALONE:
        # What is set for an engine that is alone goes with the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    forget_deepspeed()
    monkeypatch.syspath_prepend(str(STAND_IN))
    import deepspeed

    yield deepspeed
    forget_deepspeed()
    if dist.is_initialized():
        dist.destroy_process_group()
    accelerate_state = sys.modules.get("accelerate.state")
    if accelerate_state is not None:
        accelerate_state.AcceleratorState._reset_state(reset_partial_state=True)
