from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from littrainer.search.record import (
    SEARCH_RECORD_NAME,
    SearchRecord,
    StoredSearch,
    TrialRecord,
    UnreadableRecord,
    best_of,
    of_optuna,
    of_ray,
    plain,
    read_record,
)


def trainer_in(folder: Path, process_index: int = 0) -> Any:
    return SimpleNamespace(args=SimpleNamespace(output_dir=str(folder), process_index=process_index))


def test_what_is_written_is_read_back_equal(tmp_path: Path) -> None:
    trials = [
        TrialRecord(
            "0",
            "complete",
            0.75,
            {"learning_rate": 0.1, "seed": 3, "optim": "sgd", "flag": True, "nothing": None},
            {"learning_rate": {"kind": "float", "low": 0.01, "high": 1.0, "log": True, "step": None}},
            [(5, 0.5), (10, 0.75)],
            12.5,
            "out/run-0",
        ),
        TrialRecord("1", "failed", parameters={"learning_rate": 1.0}, error="ValueError: no"),
        TrialRecord("2", "pruned", intermediate=[(5, math.inf)]),
        TrialRecord("3", "running"),
    ]
    SearchRecord(trainer_in(tmp_path / "new"), "optuna", ["maximize"], "a study", ["accuracy"]).update(trials)
    assert read_record(tmp_path / "new") == StoredSearch("optuna", ["maximize"], "a study", ["accuracy"], trials)


def test_a_record_stays_where_the_search_began_and_the_first_process_writes_it(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    record = SearchRecord(trainer, "ray", ["minimize"])
    record.update([TrialRecord("a", "complete", 1.0)])
    trainer.args.output_dir = str(tmp_path / "elsewhere")
    record.update([TrialRecord("a", "complete", 1.0), TrialRecord("b", "complete", math.nan)])
    SearchRecord(trainer_in(tmp_path, process_index=1), "optuna", ["minimize"]).update([])
    first, second = read_record(tmp_path / SEARCH_RECORD_NAME).trials
    assert (first.id, second.id) == ("a", "b") and math.isnan(second.objectives()[0])
    assert [path.name for path in tmp_path.iterdir()] == [SEARCH_RECORD_NAME]


def test_a_record_that_cannot_be_written_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    record = SearchRecord(trainer_in(tmp_path / "file"), "optuna", ["minimize"])
    with caplog.at_level(logging.WARNING, "littrainer"):
        record.update([])
        record.update([])
    (message,) = caplog.messages
    assert "hyperparameter_search.json cannot be written" in message


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (numpy.float32(0.5), 0.5),
        (numpy.bool_(True), True),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        ((1, 2), [1, 2]),
        ({1: {"a": numpy.float64(1.5)}}, {"1": {"a": 1.5}}),
        (Path("a"), "a"),
    ],
)
def test_values_become_what_json_holds(value: Any, stored: Any) -> None:
    found = plain(value)
    assert found == stored and type(found) is type(stored)
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "it is no record of a search"),
        ({"version": 2}, "its version is 2, and 1 is known here"),
        ({"version": 1, "backend": "ray", "directions": [], "trials": [{"number": 3}]}, "it is no record of a search"),
    ],
)
def test_a_file_that_is_no_record_is_refused_with_the_reason(tmp_path: Path, content: Any, reason: str) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / SEARCH_RECORD_NAME).write_text(text)
    with pytest.raises(UnreadableRecord, match=reason):
        read_record(tmp_path)


def test_the_best_trial_is_the_first_complete_one_with_the_best_objective() -> None:
    trials = [
        TrialRecord("0", "pruned", 9.0),
        TrialRecord("1", "complete", 2.0),
        TrialRecord("2", "complete", math.nan),
        TrialRecord("3", "complete", 3.0),
        TrialRecord("4", "complete", 3.0),
    ]
    assert [trial.id for trial in best_of(trials, ["maximize"])] == ["3"]
    assert [trial.id for trial in best_of(trials, ["minimize"])] == ["1"]
    assert best_of(trials[:1], ["maximize"]) == []


def test_with_several_objectives_the_best_are_those_that_none_surpasses() -> None:
    objectives = [[1.0, 1.0], [2.0, 2.0], [2.0, 3.0], [0.5, 0.5], [2.0, 2.0], [0.5]]
    trials = [TrialRecord(str(number), "complete", values) for number, values in enumerate(objectives)]
    assert {trial.id for trial in best_of(trials, ["maximize", "minimize"])} == {"0", "1", "3", "4"}


def test_optunas_distributions_keep_their_ends_spread_and_step() -> None:
    optuna = pytest.importorskip("optuna")
    study = optuna.create_study()
    trial = study.ask()
    trial.suggest_float("rate", 1e-5, 1e-1, log=True)
    trial.suggest_float("decay", 0.0, 0.5, step=0.1)
    trial.suggest_int("epochs", 1, 9, step=2)
    trial.suggest_categorical("optim", ["sgd", None, 3])
    found = {name: of_optuna(drawn) for name, drawn in trial.distributions.items()}
    assert found == {
        "rate": {"kind": "float", "low": 1e-5, "high": 1e-1, "log": True, "step": None},
        "decay": {"kind": "float", "low": 0.0, "high": 0.5, "log": False, "step": 0.1},
        "epochs": {"kind": "int", "low": 1, "high": 9, "log": False, "step": 2},
        "optim": {"kind": "categorical", "choices": ["sgd", None, 3]},
    }


def _number(kind: str, low: float, high: float, log: bool = False, step: float | None = None) -> dict[str, Any]:
    return {"kind": kind, "low": low, "high": high, "log": log, "step": step}


def test_rays_search_space_is_told_with_both_ends_included() -> None:
    # Without the rest of Ray Tune, whose import takes seconds.
    sample = pytest.importorskip("ray.tune.search.sample")
    assert of_ray(sample.uniform(0.0, 2.0)) == _number("float", 0.0, 2.0)
    assert of_ray(sample.loguniform(1e-5, 1e-2)) == _number("float", 1e-5, 1e-2, log=True)
    assert of_ray(sample.quniform(0.0, 1.0, 0.25)) == _number("float", 0.0, 1.0, step=0.25)
    assert of_ray(sample.qloguniform(1.0, 16.0, 1.0)) == _number("float", 1.0, 16.0, log=True, step=1.0)
    assert of_ray(sample.randint(1, 5)) == _number("int", 1, 4, step=1)
    assert of_ray(sample.lograndint(1, 50)) == _number("int", 1, 49, log=True, step=1)
    assert of_ray(sample.qrandint(2, 10, 2)) == _number("int", 2, 10, step=2)
    assert of_ray(sample.choice([4, 8])) == {"kind": "categorical", "choices": [4, 8]}
    assert of_ray({"grid_search": [1, 2]}) == {"kind": "categorical", "choices": [1, 2]}
    # What has no ends is left out.
    assert [of_ray(drawn) for drawn in (sample.randn(), sample.sample_from(lambda spec: 1), 0.5, "sgd")] == [None] * 4
