"""Two GPUs train as one does with batches twice as large."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.gpu.conftest import needs_gpus, run_training
from tests.gpu.trainings import SPREAD

pytestmark = needs_gpus(2)


@pytest.mark.parametrize("name", SPREAD)
def test_losses_are_those_of_one_gpu_and_the_model_is_saved_whole(tmp_path: Path, name: str) -> None:
    if "deepspeed" in name and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    from transformers import AutoModelForCausalLM

    alone = run_training("ours", "fp32", tmp_path / "alone")[0]
    first, second = run_training("ours", name, tmp_path / "together", processes=2)
    assert first == second
    for found, expected in zip(first, alone, strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    AutoModelForCausalLM.from_pretrained(tmp_path / "together" / "saved")
