from __future__ import annotations

from pathlib import Path

import pytest
import torch

from littrainer.training.device_memory import empty_device_cache
from tests.scenarios.trainers import quiet_trainer


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A note for each time the cache of a GPU, which is made to exist, is emptied."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    return calls


def test_the_cache_of_the_accelerator_is_emptied(emptied: list[str]) -> None:
    empty_device_cache()
    assert emptied == ["emptied"]


@pytest.mark.parametrize(("steps", "expected"), [(None, 0), (1, 6), (2, 4), (3, 2)])
def test_the_cache_is_emptied_in_every_so_many_optimizer_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int | None, expected: int
) -> None:
    calls: list[str] = []
    monkeypatch.setattr("littrainer.training.device_memory.empty_device_cache", lambda: calls.append("emptied"))
    # Three optimizer steps of two micro-batches each.
    trainer = quiet_trainer(
        tmp_path, rows=24, max_steps=3, gradient_accumulation_steps=2, torch_empty_cache_steps=steps
    )
    trainer.train()
    assert len(calls) == expected
