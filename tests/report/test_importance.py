from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from littrainer.report.importance import importance_of
from littrainer.report.searches import parameters_of
from littrainer.search.record import TrialRecord, of_optuna

from .search_folders import some_trials, write_search
from .test_searches import search_of

optuna = pytest.importorskip("optuna")


def found_in(folder: Path, objective: int = 0) -> Any:
    search = search_of(folder)
    return importance_of(search, parameters_of(search), objective)


def test_it_is_what_optuna_finds_in_the_study_itself(tmp_path: Path) -> None:
    def objective(trial: Any) -> float:
        rate = trial.suggest_float("rate", 1e-5, 1e-1, log=True)
        decay = trial.suggest_float("decay", 0.0, 0.5, step=0.125)
        kind = trial.suggest_categorical("kind", ["a", "b", "c"])
        extra = trial.suggest_int("extra", 1, 9, step=2) if kind == "b" else 0
        return abs(rate - 1e-3) * 100 + decay / 10 + extra / 50

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(objective, n_trials=40)
    trials = [
        TrialRecord(
            str(trial.number),
            "complete",
            trial.value,
            trial.params,
            {name: of_optuna(drawn) for name, drawn in trial.distributions.items()},
        )
        for trial in study.trials
    ]
    expected = optuna.importance.get_param_importances(study, evaluator=optuna.importance.PedAnovaImportanceEvaluator())
    found = found_in(write_search(tmp_path, trials, ["minimize"]))
    assert found.shares == {name: float(share) for name, share in expected.items()}
    assert found.remark == "from 40 complete trials"


def test_trials_of_a_backend_without_distributions_are_weighed_too(tmp_path: Path) -> None:
    trials = some_trials(40)
    for trial in trials:
        trial.distributions = {}
    found = found_in(write_search(tmp_path, trials, backend="ray"))
    assert set(found.shares) == {"learning_rate", "per_device_train_batch_size", "num_train_epochs"}
    assert sum(found.shares.values()) == pytest.approx(1.0)


def test_each_of_several_objectives_has_its_own(tmp_path: Path) -> None:
    folder = write_search(tmp_path, some_trials(60, objectives=2), ["maximize", "minimize"])
    assert next(iter(found_in(folder, 1).shares)) == "num_train_epochs"
    assert found_in(folder, 0).shares != found_in(folder, 1).shares


def test_few_trials_are_called_rough_and_fewer_are_not_weighed(tmp_path: Path) -> None:
    assert found_in(write_search(tmp_path, some_trials(12))).remark == "from 10 complete trials: rough with so few"
    found = found_in(write_search(tmp_path, some_trials(3)))
    assert found.shares == {} and "needs 8 complete trials at least; there are 3" in found.remark


def test_equal_objectives_tell_nothing(tmp_path: Path) -> None:
    trials = some_trials(12)
    for trial in trials:
        trial.objective = 0.5 if trial.state == "complete" else None
    found = found_in(write_search(tmp_path, trials))
    assert found.shares == {} and "have the same objective" in found.remark


def test_one_parameter_alone_is_not_weighed(tmp_path: Path) -> None:
    trials = [TrialRecord(str(number), "complete", float(number), {"a": number}) for number in range(9)]
    assert found_in(write_search(tmp_path, trials)) == ({}, "")


def test_without_optuna_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "optuna" else known(name))
    found = found_in(write_search(tmp_path))
    assert found.shares == {} and "pip install 'littrainer[tune]'" in found.remark


def test_distributions_that_cannot_be_are_no_error(tmp_path: Path) -> None:
    trials = some_trials(12)
    for trial in trials:
        trial.distributions["learning_rate"] = {"kind": "float", "low": 5, "high": "x", "log": True, "step": -1}
        trial.distributions["num_train_epochs"] = {"kind": "int", "low": 1.5, "high": 4, "log": 3, "step": 0.25}
    assert set(found_in(write_search(tmp_path, trials)).shares) == set(trials[0].parameters)
