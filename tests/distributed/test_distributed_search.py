"""Two processes that search together: both train each trial, and whatever becomes of it becomes of it in both."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.together import found_together

LOST_MEMORY = "ValueError: sample 17 does not fit into memory"
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each of two processes found; they are started once for all tests."""
    return found_together(tmp_path_factory, "searching-together", "tests.distributed.searching_process")[1]


def test_a_pruned_trial_ends_at_the_same_step_in_both(found: Found) -> None:
    for one in found:
        assert one["pruning"]["ended"] == [3, 2, 3]
    assert [state for _, state, _ in found[0]["pruning"]["trials"]] == ["COMPLETE", "PRUNED", "COMPLETE"]


def test_a_trial_that_fails_in_one_process_has_failed_in_both_which_go_on(found: Found) -> None:
    first, second = (one["failing_in_one"] for one in found)
    third = first["trials"][2][2]
    assert [trial[1:] for trial in first["trials"]] == [
        ("COMPLETE", None),
        ("FAIL", f"FailedElsewhere: Process 0 ends because a forward pass failed in process 1 with {LOST_MEMORY}"),
        ("FAIL", third),
        ("COMPLETE", None),
    ]
    assert "in process 1 with ValueError: a label is missing" in third
    assert first["best"] == second["best"]
    assert first["begun"] == second["begun"] and len(first["begun"]) == 4


def test_a_failure_that_nothing_catches_or_between_steps_ends_the_search_in_both_and_is_named(found: Found) -> None:
    first, second = (one["failing_at_the_first"] for one in found)
    assert second["error"] == LOST_MEMORY and f"in process 1 with {LOST_MEMORY}" in first["error"]
    assert len(first["begun"]) == len(second["begun"]) == 2
    for one in found:
        between = one["failing_between_steps"]
        assert "failed" in between["error"] and "ValueError: the disk of this process is full" in between["error"]
        assert between["begun"] == 1


def test_the_objective_is_that_of_the_first_process_in_all_and_nan_fails_in_all(found: Found) -> None:
    first, second = (one["an_objective_of_each_process"] for one in found)
    assert [state for _, state, _ in first["trials"]] == ["COMPLETE", "COMPLETE", "FAIL"]
    assert first["best"] == second["best"] and first["best"].objective == 0.4


def test_both_processes_train_what_a_sweep_draws_for_the_first_one(found: Found) -> None:
    first, second = (one["sweep"] for one in found)
    assert first["begun"] == second["begun"] == [(rate, {"learning_rate": rate}) for rate in (0.01, 0.02)]
    assert (first["drawn"], second["drawn"]) == (2, 0)
    assert first["best"] == second["best"] and first["best"].run_summary == "sweep7"
    assert first["logged"][1] == {"objective": first["best"].objective}
    assert first["folders"] == ["run-id1", "run-id2"]
    assert first["record"] == [("id1", "complete", 3), ("id2", "complete", 3)]


def test_what_runs_or_stops_trials_in_one_process_is_refused(found: Found) -> None:
    for one in found:
        assert "early_terminate" in one["sweep"]["refused"]
        assert "n_jobs=2 runs each trial in one process, and here 2 processes train one model" in one["jobs"]
