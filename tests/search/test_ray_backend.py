"""Searches on Ray Tune, which `ray_searches.py` runs once for all tests of this file."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from littrainer.search.backends import run_hp_search_ray
from littrainer.search.parameters import SearchMistake
from littrainer.search.record import COMPLETE, FAILED, PRUNED, StoredSearch, load_search_record
from tests.fidelity.conftest import ROOT, environment_of_runs
from tests.scenarios.once_per_session import run_once
from tests.search.ray_searches import BETTER_RATE, FAILING_RATE, NEW_DECAY, NEW_RATE, WORSE_RATE, trainer_for
from tests.search.trainers import searched_trainer

MAX_RUN_S = 900


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all searches."""
    return run_once(tmp_path_factory, "ray_searches", run_searches)


def run_searches(folder: Path) -> None:
    """Run the script, and kill its processes after a timeout."""
    # Paths of Ray's sockets must be short.
    temporary = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    command = [sys.executable, "-m", "littrainer", "run", str(ROOT / "tests/search/ray_searches.py"), str(folder)]
    environment = {**environment_of_runs(), "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, temporary], cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            process.wait(MAX_RUN_S)
        except subprocess.TimeoutExpired:
            # Ray's processes end with this process.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    shutil.rmtree(temporary, ignore_errors=True)


def outcome(searched: Path, name: str) -> Any:
    """Return the result of a search."""
    file = searched / "outcomes.json"
    result = json.loads(file.read_text()).get(name) if file.exists() else None
    assert result is not None and "failed" not in result, f"{result}\n{(searched / 'log').read_text()[-5000:]}"
    return result


def record(searched: Path, name: str) -> StoredSearch:
    return load_search_record(searched / name)


def events(searched: Path, name: str, rate: float) -> list[dict[str, Any]]:
    """Return the events of trials with a learning rate."""
    lines = (searched / name / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["drawn_rate"] == rate]


def objective_of_training(folder: Path, **changes: Any) -> float:
    """Return the final evaluation loss of the same training in this process."""
    trainer = trainer_for(str(folder), **changes)
    trainer.train()
    return trainer.evaluate()["eval_loss"]


def test_the_best_trial_is_as_good_as_the_same_training_outside_of_a_search(searched: Path, tmp_path: Path) -> None:
    result = outcome(searched, "stopped_and_failing")
    run_id, objective, hyperparameters = result["best"]
    assert hyperparameters == {"learning_rate": BETTER_RATE}
    assert objective == objective_of_training(tmp_path, learning_rate=BETTER_RATE, max_steps=4)
    assert run_id == record(searched, "stopped").trials[0].id
    assert result["arguments_restored"] and result["backend_after"] is None and result["trials_in_analysis"] == 3


def test_asha_stops_a_trial_at_its_first_evaluation_and_a_failure_does_not_end_the_search(searched: Path) -> None:
    outcome(searched, "stopped_and_failing")
    complete, stopped, failed = record(searched, "stopped").trials
    assert [trial.state for trial in (complete, stopped, failed)] == [COMPLETE, PRUNED, FAILED]
    assert failed.error == "RuntimeError: memory ran out in this trial"
    assert failed.parameters == {"learning_rate": FAILING_RATE}
    steps_and_ends = [(event["event"], event["step"]) for event in events(searched, "stopped", WORSE_RATE)]
    assert steps_and_ends == [("begins", 0), ("steps", 1), ("ends", 1)]
    last = events(searched, "stopped", BETTER_RATE)[-1]
    assert (last["event"], last["step"]) == ("ends", 4)
    # The relative output_dir of the script is in the folder in which it was started.
    for trial, steps in ((complete, (1, 2, 3, 4)), (stopped, (1,))):
        folder = Path(str(trial.folder))
        assert folder == searched / "stopped" / f"run-{trial.id}"
        assert sorted(path.name for path in folder.iterdir()) == [f"checkpoint-{step}" for step in steps]


def test_a_paused_trial_resumes_exactly(searched: Path, tmp_path: Path) -> None:
    paused, other = outcome(searched, "population")["objectives"]
    trial_events = events(searched, "population", BETTER_RATE)
    assert [event["step"] for event in trial_events if event["event"] == "begins"] == [0, 4]
    assert len({event["pid"] for event in trial_events}) == 2
    assert paused == objective_of_training(tmp_path, learning_rate=BETTER_RATE, num_train_epochs=3)
    assert outcome(searched, "population")["best"][1] == min(paused, other)


def test_a_trial_that_continues_from_another_has_the_new_hyperparameters(searched: Path, tmp_path: Path) -> None:
    outcome(searched, "population")
    changed = [event for event in events(searched, "population", NEW_RATE) if event["event"] == "steps"]
    assert [(event["step"], event["decay"]) for event in changed] == [(5, NEW_DECAY), (6, NEW_DECAY)]
    # The schedule decreases to zero over six steps, and continues at its step.
    assert [event["rate"] for event in changed] == pytest.approx([NEW_RATE / 6, 0.0])
    worse = next(
        trial for trial in record(searched, "population").trials if trial.parameters["learning_rate"] == NEW_RATE
    )
    assert [step for step, _ in worse.intermediate] == [2, 4, 6]


def test_a_trial_without_evaluations_is_evaluated_at_its_end_and_an_error_of_the_script_ends_the_search(
    searched: Path,
) -> None:
    ended = outcome(searched, "ended_by_a_mistake")
    assert "no_such_switch" in ended["error"] and ended["backend_after"] is None
    search = record(searched, "mistaken")
    assert search.directions == ["maximize"] and [trial.state for trial in search.trials] == [COMPLETE, FAILED]
    first = search.trials[0]
    assert first.parameters == {"hidden": 5, "learning_rate": BETTER_RATE}
    assert [(step, value < 0) for step, value in first.intermediate] == [(1, True)]
    # The result of hp_name.
    assert first.folder == str(searched / "mistaken" / f"rate-{BETTER_RATE}")
    assert Path(first.folder, "checkpoint-1").is_dir()


# ---- Refusals before Ray is started ----------------------------------------------------------------------------------


def test_invalid_input_is_refused_before_ray_is_started(tmp_path: Path) -> None:
    from ray.tune.schedulers import ASHAScheduler

    with pytest.raises(SearchMistake, match='backend="ray" runs each trial in one process'):
        run_hp_search_ray(SimpleNamespace(args=SimpleNamespace(world_size=2)), 1, "minimize")  # type: ignore[arg-type]
    trainer = searched_trainer(tmp_path)
    for keywords, error, message in (
        ({"scheduler": ASHAScheduler()}, RuntimeError, "needs evaluations while trials train"),
        ({"resources_per_trial": {"gpu": 2}}, ValueError, "gives 2 GPUs to each trial"),
    ):
        with pytest.raises(error, match=message):
            trainer.hyperparameter_search(lambda trial: {"learning_rate": 1e-3}, backend="ray", **keywords)


def _number(kind: str, low: float, high: float, log: bool = False, step: float | None = None) -> dict[str, Any]:
    return {"kind": kind, "low": low, "high": high, "log": log, "step": step}


def test_domains_are_described_with_both_ends_included() -> None:
    from ray.tune.search import sample

    from littrainer.search.ray_backend import describe_domain

    assert describe_domain(sample.uniform(0.0, 2.0)) == _number("float", 0.0, 2.0)
    assert describe_domain(sample.loguniform(1e-5, 1e-2)) == _number("float", 1e-5, 1e-2, log=True)
    assert describe_domain(sample.quniform(0.0, 1.0, 0.25)) == _number("float", 0.0, 1.0, step=0.25)
    assert describe_domain(sample.qloguniform(1.0, 16.0, 1.0)) == _number("float", 1.0, 16.0, log=True, step=1.0)
    assert describe_domain(sample.randint(1, 5)) == _number("int", 1, 4, step=1)
    assert describe_domain(sample.lograndint(1, 50)) == _number("int", 1, 49, log=True, step=1)
    assert describe_domain(sample.qrandint(2, 10, 2)) == _number("int", 2, 10, step=2)
    assert describe_domain(sample.choice([4, 8])) == {"kind": "categorical", "choices": [4, 8]}
    assert describe_domain({"grid_search": [1, 2]}) == {"kind": "categorical", "choices": [1, 2]}
    assert [describe_domain(drawn) for drawn in (sample.randn(), sample.sample_from(lambda spec: 1), 0.5, "sgd")] == [
        None
    ] * 4
