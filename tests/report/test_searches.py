from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from littrainer.report.searches import Parameter, Search, UnreadableSearch, parameters_of, read_search
from littrainer.search.record import SEARCH_RECORD_NAME, TrialRecord

from .search_folders import write_search


def search_of(folder: Path) -> Search:
    search = read_search(folder, "a search")
    assert search is not None
    return search


def parameters_in(tmp_path: Path, *values: dict[str, Any], **distributions: Any) -> dict[str, Parameter]:
    trials = [
        TrialRecord(
            str(number), "complete", float(number), given, {name: distributions[name] for name in distributions}
        )
        for number, given in enumerate(values)
    ]
    return {each.name: each for each in parameters_of(search_of(write_search(tmp_path, trials)))}


def test_a_folder_without_a_record_holds_no_search(tmp_path: Path) -> None:
    assert read_search(tmp_path, "x") is None


def test_a_damaged_record_is_told_with_its_name_and_the_reason(tmp_path: Path) -> None:
    (tmp_path / SEARCH_RECORD_NAME).write_text('{"version": 1, "directions": ["minimize"]')
    with pytest.raises(
        UnreadableSearch, match=r"hyperparameter_search.json is not a readable record of a search \(Exp"
    ):
        read_search(tmp_path, "x")
    (tmp_path / SEARCH_RECORD_NAME).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UnreadableSearch, match="is not a readable record"):
        read_search(tmp_path, "x")


def test_complete_trials_are_ranked_by_the_direction(tmp_path: Path) -> None:
    trials = [TrialRecord(str(number), "complete", value) for number, value in enumerate([2.0, 3.0, 1.0])]
    trials += [TrialRecord("3", "complete", float("inf")), TrialRecord("4", "pruned", 9.0)]
    for direction, order in (("maximize", ["1", "0", "2"]), ("minimize", ["2", "0", "1"])):
        search = search_of(write_search(tmp_path, trials, [direction]))
        assert [trial.id for trial in search.ranked()] == order


def test_notes_tell_of_running_trials_and_of_searches_without_a_complete_one(tmp_path: Path) -> None:
    assert search_of(write_search(tmp_path, [])).notes == ["No trial had ended when the record was written."]
    failed = [TrialRecord("0", "failed", error="ValueError: no"), TrialRecord("1", "running")]
    assert search_of(write_search(tmp_path, failed)).notes == [
        "1 trial was running when the record was written.",
        "No trial is complete. The first failure: ValueError: no",
    ]


def test_secrets_among_hyperparameters_are_hidden(tmp_path: Path) -> None:
    search = search_of(write_search(tmp_path, [TrialRecord("0", "complete", 1.0, {"hub_token": "hf_abc", "seed": 1})]))
    assert search.trials[0].parameters == {"hub_token": "<HUB_TOKEN>", "seed": 1}
    assert "hf_abc" not in search.file.read_text()


def test_an_axis_of_numbers_spans_what_they_are_drawn_from(tmp_path: Path) -> None:
    drawn = {"kind": "float", "low": 1e-5, "high": 1e-1, "log": True, "step": None}
    rate = parameters_in(tmp_path, {"rate": 1e-3}, {"rate": 1e-2}, rate=drawn)["rate"]
    assert (rate.axis.low, rate.axis.high, rate.axis.logarithmic) == (1e-5, 1e-1, True)
    assert rate.share(TrialRecord("x", "complete", parameters={"rate": 1e-3})) == pytest.approx(0.5)
    assert rate.share(TrialRecord("x", "complete")) is None
    assert rate.text() == "1e-5 to 0.1, by powers"


def test_values_without_a_distribution_span_their_own_range(tmp_path: Path) -> None:
    found = parameters_in(tmp_path, {"a": 1, "b": 0.5, "c": "x"}, {"a": 5, "b": 0.25, "c": "y"})
    assert (found["a"].axis.low, found["a"].axis.high, found["a"].whole) == (1.0, 5.0, True)
    assert (found["b"].axis.low, found["b"].axis.high, found["b"].whole) == (0.25, 0.5, False)
    assert found["c"].choices == ("x", "y")


def test_values_beyond_their_distribution_widen_the_axis(tmp_path: Path) -> None:
    drawn = {"kind": "float", "low": 0.0, "high": 1.0, "log": True, "step": None}
    odd = parameters_in(tmp_path, {"a": -3.0}, {"a": 2.0}, a=drawn)["a"]
    assert (odd.axis.low, odd.axis.high, odd.axis.logarithmic) == (-3.0, 2.0, False)


def test_choices_keep_the_order_of_the_space_and_mixed_kinds_are_choices(tmp_path: Path) -> None:
    drawn = {"kind": "categorical", "choices": [16, 4, None]}
    found = parameters_in(tmp_path, {"a": 4, "b": 1}, {"a": None, "b": [1, 2]}, a=drawn)
    assert found["a"].choices == ("16", "4", "None")
    assert found["a"].share(TrialRecord("x", "complete", parameters={"a": 4})) == 0.5
    assert found["b"].choices == ("1", "[1, 2]")


def test_what_never_changes_gets_no_axis(tmp_path: Path) -> None:
    assert parameters_in(tmp_path, {"a": 1, "b": "x"}, {"a": 1, "b": "x"}) == {}


def test_hundreds_of_choices_have_few_labels(tmp_path: Path) -> None:
    (parameter,) = parameters_in(tmp_path, *({"a": f"choice {number}"} for number in range(500))).values()
    assert len(parameter.axis.labels) <= 12 and parameter.axis.labels[0] == "choice 0"
    assert parameter.text().endswith("and 488 more")
