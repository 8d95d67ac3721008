from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from littrainer.search.progress_lines import line, told
from littrainer.search.record import TrialRecord


@pytest.fixture(autouse=True)
def level_of_the_logger() -> Iterator[logging.Logger]:
    ours = logging.getLogger("littrainer")
    before = ours.level
    yield ours
    ours.setLevel(before)


def test_a_complete_trial_tells_its_objective_duration_parameters_and_the_best() -> None:
    best = TrialRecord("2", "complete", 0.925)
    trial = TrialRecord("5", "complete", 0.875, {"learning_rate": 3.14159265e-05, "optim": "sgd"}, seconds=75.2)
    assert line(trial, (4, 20), [best]) == (
        "[littrainer] trial 5 (4 of 20) complete in 1 min 15 s: 0.875; learning_rate=3.14159e-05, optim=sgd; "
        "best so far: 0.925 in trial 2"
    )
    assert line(trial, (4, None), [trial]).endswith("; the best so far") and "(4)" in line(trial, (4, None), [trial])


def test_a_pruned_trial_tells_at_which_step_and_with_which_value() -> None:
    trial = TrialRecord("1", "pruned", intermediate=[(10, 0.25), (20, 0.375)], seconds=1.25)
    assert line(trial, (2, 2), []) == (
        "[littrainer] trial 1 (2 of 2) pruned at step 20 in 1.2 s: 0.375; none is complete so far"
    )


def test_a_failed_trial_tells_its_error_in_the_same_line() -> None:
    trial = TrialRecord("1", "failed", error="OutOfMemoryError: no\nroom", parameters={"note": "a\nb" + "c" * 100})
    text = line(trial, (2, 2), [])
    assert "failed: OutOfMemoryError: no room; note=a b" in text
    assert "\n" not in text and len(text) < 200


def test_one_line_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    told(TrialRecord("0", "complete", 1.0), (1, 1), [])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.strip().startswith("[littrainer] trial 0 (1 of 1) complete") and printed.err.count("\n") == 1


def test_a_log_level_above_warnings_tells_nothing(
    capsys: pytest.CaptureFixture[str], level_of_the_logger: logging.Logger
) -> None:
    level_of_the_logger.setLevel(logging.ERROR)
    told(TrialRecord("0", "complete", 1.0), (1, 1), [])
    assert capsys.readouterr().err == ""
