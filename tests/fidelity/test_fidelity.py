"""Every scenario leaves what it leaves with transformers' own Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from littrainer.commands.differences import first_difference
from tests.fidelity.differences import read_record
from tests.fidelity.record import Record
from tests.fidelity.registry import aspects_of
from tests.fidelity.scenarios import COMPARED, REFUSED_TODAY, SCENARIOS
from tests.fidelity.side import MODES, ORACLE


def finished_record(runs: Path, run: str, name: str) -> Record:
    record = read_record(runs / run, name)
    if record.error:
        pytest.fail(f"{name} raised with {run}:\n{record.error}", pytrace=False)
    return record


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", COMPARED)
def test_a_run_leaves_what_transformers_own_trainer_leaves(runs: Path, name: str, mode: str) -> None:
    expected, actual = finished_record(runs, ORACLE, name), finished_record(runs, mode, name)
    # One test for all aspects of a run, of which there are thousands, and each that differs is told.
    differing = []
    for aspect in aspects_of(SCENARIOS[name]):
        difference = first_difference(getattr(expected, aspect), getattr(actual, aspect), SCENARIOS[name].tolerance)
        if difference:
            differing.append(f"{name} ({mode}), {aspect}{difference}")
    if differing:
        pytest.fail("\n".join(differing), pytrace=False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["plain_module_returning_a_dictionary"])
def test_only_an_overridden_training_step_runs_under_manual_optimization(runs: Path, name: str, mode: str) -> None:
    assert finished_record(runs, mode, name).automatic_optimization is (mode == "automatic")


@pytest.mark.parametrize("name", [name for name in COMPARED if SCENARIOS[name].saves])
def test_a_scenario_that_saves_leaves_weights_to_compare(runs: Path, name: str) -> None:
    files = finished_record(runs, ORACLE, name).checkpoints
    assert any(file.endswith(".safetensors") and weights for file, weights in files.items())


@pytest.mark.parametrize(("name", "argument"), REFUSED_TODAY.items())
def test_an_argument_that_is_not_carried_out_yet_stops_the_run_by_name(runs: Path, name: str, argument: str) -> None:
    finished_record(runs, ORACLE, name)
    error = read_record(runs / "automatic", name).error
    assert error is not None, f"{name} runs now: take it out of REFUSED_TODAY"
    last_line = error.strip().splitlines()[-1]
    assert last_line.startswith("NotImplementedError") and argument in last_line
