"""Peaks of memory on the device are at most transformers', and a Trainer that is deleted leaves nothing there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.simulated_gpu.conftest import simulated_environment
from tests.simulated_gpu.measured_trainings import MEMORY, OURS_ALONE, measure_chunked_loss, measure_memory
from tests.simulated_gpu.run import run_on_gpu

# Losses and gradient norms stay on the device until they are logged.
MAX_BYTES_OF_NUMBERS = 4096
MAX_SHARE_AT_A_RESUME = 1.05
MAX_SHARE_OF_A_CHUNKED_LOSS = 0.35


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("memory")
    sides = ("littrainer", "transformers")
    return {side: run_on_gpu(measure_memory, folder, simulated_environment(), side) for side in sides}


@pytest.mark.parametrize("name", MEMORY)
def test_the_peak_is_at_most_that_of_transformers(memory: dict[str, dict[str, Any]], name: str) -> None:
    ours, theirs = (memory[side][name]["peak"] for side in ("littrainer", "transformers"))
    assert 0 < ours <= theirs * (MAX_SHARE_AT_A_RESUME if "resume" in name else 1) + MAX_BYTES_OF_NUMBERS


@pytest.mark.parametrize("name", [*MEMORY, *OURS_ALONE])
def test_a_deleted_trainer_frees_the_device(memory: dict[str, dict[str, Any]], name: str) -> None:
    assert memory["littrainer"][name]["left"] == 0


def test_a_background_save_uses_no_device_memory(memory: dict[str, dict[str, Any]]) -> None:
    ours = memory["littrainer"]
    assert ours["async_save"]["peak"] <= ours["saving"]["peak"] + MAX_BYTES_OF_NUMBERS


def test_averaged_weights_use_the_memory_of_a_further_model(memory: dict[str, dict[str, Any]]) -> None:
    ours = memory["littrainer"]
    # AdamW's two states are as large as the weights, as is what the evaluation of a model alone takes at least.
    weights = ours["evaluation"]["peak"]
    assert ours["ema_decay"]["peak"] <= ours["saving"]["peak"] + weights


def test_a_loss_over_chunks_uses_a_third_of_the_memory_with_a_large_vocabulary(tmp_path: Path) -> None:
    peaks = run_on_gpu(measure_chunked_loss, tmp_path, simulated_environment())
    assert 0 < peaks[True] <= MAX_SHARE_OF_A_CHUNKED_LOSS * peaks[False]
