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
    find_best_trials,
    load_search_record,
    plain,
)


def arguments(folder: Path, process_index: int = 0) -> Any:
    return SimpleNamespace(output_dir=str(folder), process_index=process_index)


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
    SearchRecord(arguments(tmp_path / "new"), "optuna", ["maximize"], "a study", ["accuracy"]).update(trials)
    assert load_search_record(tmp_path / "new") == StoredSearch("optuna", ["maximize"], "a study", ["accuracy"], trials)


def test_a_record_stays_where_the_search_began_and_the_first_process_writes_it(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    record = SearchRecord(args, "ray", ["minimize"])
    record.update([TrialRecord("a", "complete", 1.0)])
    args.output_dir = str(tmp_path / "elsewhere")
    record.update([TrialRecord("a", "complete", 1.0), TrialRecord("b", "complete", math.nan)])
    SearchRecord(arguments(tmp_path, process_index=1), "optuna", ["minimize"]).update([])
    first, second = load_search_record(tmp_path / SEARCH_RECORD_NAME).trials
    assert (first.id, second.id) == ("a", "b") and math.isnan(second.objectives()[0])
    assert [path.name for path in tmp_path.iterdir()] == [SEARCH_RECORD_NAME]


def test_a_record_that_cannot_be_written_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    record = SearchRecord(arguments(tmp_path / "file"), "optuna", ["minimize"])
    with caplog.at_level(logging.WARNING, "littrainer"):
        record.update([])
        record.update([])
    (message,) = caplog.messages
    assert "hyperparameter_search.json cannot be written" in message


def test_values_become_what_json_holds() -> None:
    stored = {
        0.5: numpy.float32(0.5),
        "nan": math.nan,
        "-inf": -math.inf,
        "a": Path("a"),
    }
    assert [plain(value) for value in stored.values()] == list(stored)
    nested = plain({1: {"a": (numpy.bool_(True), numpy.float64(1.5))}})
    assert nested == {"1": {"a": [True, 1.5]}} and type(nested["1"]["a"][0]) is bool


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
        load_search_record(tmp_path)


def test_the_best_trial_is_the_first_complete_trial_with_the_best_objective() -> None:
    trials = [
        TrialRecord("0", "pruned", 9.0),
        TrialRecord("1", "complete", 2.0),
        TrialRecord("2", "complete", math.nan),
        TrialRecord("3", "complete", 3.0),
        TrialRecord("4", "complete", 3.0),
    ]
    assert [trial.id for trial in find_best_trials(trials, ["maximize"])] == ["3"]
    assert [trial.id for trial in find_best_trials(trials, ["minimize"])] == ["1"]
    assert find_best_trials(trials[:1], ["maximize"]) == []


def test_with_several_objectives_the_best_are_those_that_none_surpasses() -> None:
    objectives = [[1.0, 1.0], [2.0, 2.0], [2.0, 3.0], [0.5, 0.5], [2.0, 2.0], [0.5]]
    trials = [TrialRecord(str(number), "complete", values) for number, values in enumerate(objectives)]
    assert {trial.id for trial in find_best_trials(trials, ["maximize", "minimize"])} == {"0", "1", "3", "4"}
