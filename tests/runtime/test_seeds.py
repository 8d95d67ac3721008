from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from littrainer.runtime.seeds import DETERMINISTIC_ENVIRONMENT, enable_full_determinism, seed_worker, set_seed


def draws() -> tuple[Any, ...]:
    return random.random(), np.random.random(), torch.rand(1).item()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore torch's choice of kernels."""
    for name in DETERMINISTIC_ENVIRONMENT:
        monkeypatch.setenv(name, "untouched")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    yield
    torch.use_deterministic_algorithms(False)


def test_a_seed_has_the_same_numbers_as_in_transformers(kernels: None) -> None:
    set_seed(2**32 - 1, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    ours = draws()
    transformers.set_seed(2**32 - 1)
    assert ours == draws()


@pytest.mark.parametrize("warn_only", [False, True])
def test_full_determinism_sets_kernels_and_environment_and_seeds(kernels: None, warn_only: bool) -> None:
    enable_full_determinism(7, warn_only=warn_only)
    drawn = draws()
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled() is warn_only
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    assert {name: os.environ[name] for name in DETERMINISTIC_ENVIRONMENT} == DETERMINISTIC_ENVIRONMENT
    set_seed(7)
    assert draws() == drawn


def test_workers_of_all_ranks_draw_different_numbers_that_follow_from_torchs_seed() -> None:
    drawn = set()
    for rank in (0, 1):
        torch.manual_seed(5)
        seed_worker(0, num_workers=2, rank=rank)
        drawn.add(draws())
    torch.manual_seed(5)
    transformers.trainer_utils.seed_worker(0, 2, 1)
    assert len(drawn) == 2 and draws() in drawn
