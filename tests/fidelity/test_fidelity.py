"""Every scenario leaves what it leaves with transformers' own Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fidelity.first_difference import first_difference
from tests.fidelity.record import Record, read_record
from tests.fidelity.registry import aspects_of
from tests.fidelity.scenarios import COMPARED, SCENARIOS
from tests.fidelity.side import MODES, ORACLE


def finished_record(runs: Path, run: str, name: str) -> Record:
    record = read_record(runs / run, name)
    if record.error:
        pytest.fail(f"{name} raised with {run}:\n{record.error}", pytrace=False)
    return record


def compare_records(runs: Path, name: str, mode: str) -> None:
    """Compare all aspects of a run, thousands of them, and report each difference."""
    expected, actual = finished_record(runs, ORACLE, name), finished_record(runs, mode, name)
    differences = []
    for aspect in aspects_of(SCENARIOS[name]):
        difference = first_difference(getattr(expected, aspect), getattr(actual, aspect))
        if difference:
            differences.append(f"{name} ({mode}), {aspect}{difference}")
    if differences:
        pytest.fail("\n".join(differences), pytrace=False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", COMPARED)
def test_a_run_equals_that_of_transformers_trainer(runs: Path, name: str, mode: str) -> None:
    compare_records(runs, name, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["plain_module_returning_a_dictionary"])
def test_only_an_overridden_training_step_runs_under_manual_optimization(runs: Path, name: str, mode: str) -> None:
    assert finished_record(runs, mode, name).automatic_optimization is (mode == "automatic")


@pytest.mark.parametrize("name", [name for name in COMPARED if SCENARIOS[name].saves])
def test_a_scenario_that_saves_has_weights_to_compare(runs: Path, name: str) -> None:
    files = finished_record(runs, ORACLE, name).checkpoints
    assert any(file.endswith(".safetensors") and weights for file, weights in files.items())
