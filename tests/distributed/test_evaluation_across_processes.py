"""Two processes that evaluate together find what one finds alone."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import numpy as np
import pytest

from tests.distributed import evaluating_process
from tests.distributed.evaluating_process import BATCH_SIZE, LONG, SHORT
from tests.distributed.together import found_together
from tests.scenarios.once_per_session import carried_out_once


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one process finds alone, and what each of two finds; they are started once for all tests."""
    _, together = found_together(tmp_path_factory, "evaluating-together", evaluating_process.__name__)
    find_alone = functools.partial(evaluating_process.find, rank=0, size=1)
    alone = carried_out_once(tmp_path_factory, "evaluating-alone", find_alone)
    return [pickle.loads((alone / "0.pickle").read_bytes()), *together]


def test_streaming_metrics_of_all_processes_are_those_of_one_and_count_each_sample_once(
    found: list[dict[str, Any]],
) -> None:
    alone, *together = (one["streaming_metrics"] for one in found)
    assert [one["rows"] for one in alone] == [11, 7]
    for one in together:
        assert [entry.pop("rows") for entry in one] == [11, 7]
        for entry, expected in zip(one, alone, strict=True):
            assert entry == pytest.approx({name: expected[name] for name in entry})
            assert not entry["kept"]


def test_objects_are_put_one_after_the_other_and_those_that_fill_up_left_out(found: list[dict[str, Any]]) -> None:
    alone, *together = (one["objects"] for one in found)
    expected = [boxes for batch in alone for boxes in batch]
    for one in together:
        assert [len(batch) for batch in one] == [2 * BATCH_SIZE, 8 - 2 * BATCH_SIZE]
        assert [boxes for batch in one for boxes in batch] == expected


def test_a_sharded_model_generates_what_it_generates_alone(found: list[dict[str, Any]]) -> None:
    alone, *together = (one["generated"] for one in found)
    assert len({tuple(row) for row in alone.tolist()}) > 1
    for one in together:
        # The first process was done with its batch sooner, and had to take part in the other's steps.
        assert (
            np.array_equal(one[:BATCH_SIZE, :SHORT], alone[:BATCH_SIZE, :SHORT])
            and (one[:BATCH_SIZE, SHORT:] == 0).all()
        )
        assert np.array_equal(one[BATCH_SIZE:], alone[BATCH_SIZE:]) and (one[BATCH_SIZE:, SHORT:LONG] != 0).any()


def test_a_metric_function_that_fails_in_one_process_ends_the_others_too(found: list[dict[str, Any]]) -> None:
    _, first, second = (one.get("failing", "") for one in found)
    assert second.startswith("ZeroDivisionError: no rows of that kind")
    assert first.startswith("FailedElsewhere") and "process 1 with ZeroDivisionError: no rows of that kind" in first


def test_loaders_that_give_one_process_more_batches_are_refused_in_all(found: list[dict[str, Any]]) -> None:
    for one in found[1:]:
        assert one["uneven"].startswith("UnequalData") and "rank 0 has 3 batches, rank 1 has 4 batches" in one["uneven"]


def test_processes_that_evaluate_different_things_are_refused_and_get_no_wrong_number(
    found: list[dict[str, Any]],
) -> None:
    for one in found[1:]:
        calls, samples = one["different"]["calls"], one["different"]["samples"]
        assert calls.startswith("UnequalData: The processes do not evaluate the same: rank 0 has prediction with")
        assert "rank 1 has evaluation with metric_key_prefix='eval'" in calls
        assert samples.startswith("UnequalData") and "rank 0 has 2, rank 1 has 5 samples" in samples


def test_metrics_are_those_of_the_first_process_which_writes_them(found: list[dict[str, Any]]) -> None:
    first, second = (one["of_the_process"] for one in found[1:])
    assert (first["rank"], first["history"], second["rank"], second["history"]) == (0, 0, 0, 0)
    written = ["all_results.json", "eval_results.json", "littrainer_run.json", "trainer_state.json"]
    assert first["files"] == written and second["files"] == []
