"""How often the host waits for the device: never in a step, once at a log, once for each batch in an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.simulated_gpu.conftest import simulated_environment
from tests.simulated_gpu.measured_trainings import (
    EVALUATION_BATCHES,
    TRAININGS,
    measure_waits,
    measure_waits_for_losses,
)
from tests.simulated_gpu.run import run_on_gpu


@pytest.fixture(scope="module")
def waits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_on_gpu(measure_waits, tmp_path_factory.mktemp("waits"), simulated_environment(), "littrainer")


@pytest.mark.parametrize("name", TRAININGS)
def test_no_step_between_two_logs_adds_waits_to_the_models(waits: dict[str, Any], name: str) -> None:
    assert waits[name]["step"] == 0


@pytest.mark.parametrize("name", TRAININGS)
def test_a_log_reads_all_numbers_in_a_single_transfer(waits: dict[str, Any], name: str) -> None:
    assert waits[name]["log"] == 1


@pytest.mark.parametrize("name", TRAININGS)
def test_an_evaluation_waits_at_most_once_for_each_batch(waits: dict[str, Any], name: str) -> None:
    assert 0 < waits[name]["evaluation"] <= EVALUATION_BATCHES


def test_waits_of_the_models_themselves_are_those_of_their_masks(waits: dict[str, Any]) -> None:
    assert {name: waits[name]["model"] for name in ("MLP", "BERT", "Llama", "T5")} == {
        "MLP": 0,
        "BERT": 1,
        "Llama": 2,
        "T5": 2,
    }


def test_loss_terms_are_read_at_logs_and_a_chunked_loss_reads_the_number_of_tokens(tmp_path: Path) -> None:
    waits = run_on_gpu(measure_waits_for_losses, tmp_path, simulated_environment())
    assert waits["log_loss_terms"]["step"] == 0 < waits["log_loss_terms"]["log"] <= 2
    assert waits["chunked_loss"]["step"] == 1
