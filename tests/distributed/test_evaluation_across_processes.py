"""Two processes that evaluate together find what one finds alone."""

from __future__ import annotations

import functools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import evaluating_process
from tests.distributed.checks import assert_well, endings_of
from tests.distributed.evaluating_process import BATCH_SIZE, LONG, SHORT
from tests.distributed.together import read_results
from tests.scenarios.once_per_session import carried_out_once


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes, started once for all tests, wrote what they found and how the checks ended."""
    return endings_of(tmp_path_factory, evaluating_process.__name__)


@pytest.mark.parametrize("check", [check.__name__ for check in evaluating_process.CHECKS])
def test_two_processes_evaluate_together(folder: Path, check: str) -> None:
    assert_well(folder, check)


@pytest.fixture(scope="module")
def found(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one process finds alone, and what each of two finds."""
    find_alone = functools.partial(evaluating_process.find, rank=0, size=1)
    alone = carried_out_once(tmp_path_factory, "evaluating-alone", find_alone)
    return [pickle.loads((alone / "0.pickle").read_bytes()), *read_results(folder)]


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


def test_generated_answers_come_once_for_each_sample(found: list[dict[str, Any]]) -> None:
    alone, *together = (one["answered"] for one in found)
    for one in together:
        # Labels are padded with -100 to the longest of their batch, of which each process has a part, and then with 0.
        rows, expected = ([np.where(part == -100, 0, part) for part in parts] for parts in (one, alone))
        assert all(map(np.array_equal, rows, expected))


def test_batches_by_tokens_are_predicted_in_the_datasets_order_as_by_one_process(found: list[dict[str, Any]]) -> None:
    alone, *together = (one["by_tokens"] for one in found)
    assert [len(predictions) for predictions, _ in alone] == [23, 21]
    for one in together:
        for (predictions, labels), expected in zip(one, alone, strict=True):
            assert np.allclose(predictions, expected[0], atol=1e-6)
            assert labels.tolist() == expected[1].tolist()
