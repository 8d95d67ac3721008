"""Evaluations in two processes have the results of a single process."""

from __future__ import annotations

import functools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import evaluating_process
from tests.distributed.checks import assert_passed, run_checks_in_processes
from tests.distributed.evaluating_process import BATCH_SIZE, LONG, SHORT
from tests.distributed.process_launch import read_results
from tests.scenarios.once_per_session import run_once


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with results and outcomes of the checks."""
    return run_checks_in_processes(tmp_path_factory, evaluating_process.__name__)


@pytest.mark.parametrize("check", [check.__name__ for check in evaluating_process.CHECKS])
def test_evaluations_in_two_processes(folder: Path, check: str) -> None:
    assert_passed(folder, check)


@pytest.fixture(scope="module")
def results(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of a single process, and of each of two processes."""
    run_single = functools.partial(evaluating_process.write_results, rank=0, size=1)
    single = run_once(tmp_path_factory, "evaluating-alone", run_single)
    return [pickle.loads((single / "0.pickle").read_bytes()), *read_results(folder)]


def test_streaming_metrics_count_each_sample_once(
    results: list[dict[str, Any]],
) -> None:
    single, *pair = (result["compute_streaming_metrics"] for result in results)
    assert [metrics["rows"] for metrics in single] == [11, 7]
    for result in pair:
        assert [metrics.pop("rows") for metrics in result] == [11, 7]
        for metrics, expected in zip(result, single, strict=True):
            assert metrics == pytest.approx({name: expected[name] for name in metrics})
            assert not metrics["has outputs"]


def test_objects_are_concatenated_without_padding_samples(results: list[dict[str, Any]]) -> None:
    single, *pair = (result["collect_objects"] for result in results)
    expected = [boxes for batch in single for boxes in batch]
    for batches in pair:
        assert [len(batch) for batch in batches] == [2 * BATCH_SIZE, 8 - 2 * BATCH_SIZE]
        assert [boxes for batch in batches for boxes in batch] == expected


def test_labels_with_an_entry_for_each_sample_are_concatenated_by_default(results: list[dict[str, Any]]) -> None:
    single, *pair = (result["collect_samples"] for result in results)
    assert [len(labels) for labels in single] == [8, 8] and single[0] == single[1]
    assert all(labels == single for labels in pair)


def test_predictions_with_an_entry_for_each_sample_are_concatenated_if_one_process_has_entries_like_layers(
    results: list[dict[str, Any]],
) -> None:
    single, *pair = (result["predict_samples"] for result in results)
    assert [[len(boxes) for boxes in predictions] for predictions in single] == [[1, 3, 1, 3], [2, 2, 3, 5]]
    assert all(predictions == single for predictions in pair)


def test_completions_of_a_decoder_only_model_are_those_of_a_single_process(results: list[dict[str, Any]]) -> None:
    single, *pair = (result["complete_prompts"] for result in results)
    assert single.shape == (2 * BATCH_SIZE + 1, SHORT) and len({tuple(row) for row in single.tolist()}) > 1
    assert all(np.array_equal(completions, single) for completions in pair)


def test_a_sharded_model_generates_the_tokens_of_a_single_process(results: list[dict[str, Any]]) -> None:
    single, *pair = (result["generate_with_shards"] for result in results)
    assert len({tuple(row) for row in single.tolist()}) > 1
    for tokens in pair:
        # The first process ends its batch earlier, and takes part in the steps of the second process.
        first, second = tokens[:BATCH_SIZE], tokens[BATCH_SIZE:]
        assert np.array_equal(first[:, :SHORT], single[:BATCH_SIZE, :SHORT]) and (first[:, SHORT:] == 0).all()
        assert np.array_equal(second, single[BATCH_SIZE:]) and (second[:, SHORT:LONG] != 0).any()


def test_generation_has_a_row_for_each_sample(results: list[dict[str, Any]]) -> None:
    single, *pair = (result["generate"] for result in results)
    for arrays in pair:
        # Labels are padded with -100 to the longest of the process's batch, and then with 0.
        rows, expected = ([np.where(array == -100, 0, array) for array in output] for output in (arrays, single))
        assert all(map(np.array_equal, rows, expected))


def test_predictions_by_tokens_are_in_the_order_of_the_dataset(results: list[dict[str, Any]]) -> None:
    single, *pair = (result["predict_by_tokens"] for result in results)
    assert [len(predictions) for predictions, _ in single] == [23, 21]
    for outputs in pair:
        for (predictions, labels), expected in zip(outputs, single, strict=True):
            assert np.allclose(predictions, expected[0], atol=1e-6)
            assert labels.tolist() == expected[1].tolist()
