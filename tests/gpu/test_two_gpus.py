"""Trainings on two GPUs equal those on a single GPU with batches twice as large."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import needs_gpus, run_training
from tests.gpu.trainings import SPREAD

pytestmark = needs_gpus(2)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The curve of one GPU."""
    return run_training("ours", "fp32", tmp_path_factory.mktemp("one") / "alone")[0]


@pytest.mark.parametrize("name", SPREAD)
def test_losses_equal_those_of_a_single_gpu_and_the_full_model_is_saved(tmp_path: Path, alone: Any, name: str) -> None:
    if "deepspeed" in name and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    from transformers import AutoModelForCausalLM

    first, second = run_training("ours", name, tmp_path / "together", processes=2)
    assert first == second
    for results, expected in zip(first, alone, strict=True):
        assert results == pytest.approx(expected, abs=1e-5)
    AutoModelForCausalLM.from_pretrained(tmp_path / "together" / "saved")
