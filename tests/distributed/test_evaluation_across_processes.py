"""Two processes that evaluate together find what one finds alone."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import numpy as np
import pytest
import torch

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


def test_each_sample_counts_once_in_the_order_of_the_dataset(found: list[dict[str, Any]]) -> None:
    alone, *together = (one["classification"] for one in found)
    assert len(alone["label_ids"]) == 11 and len(alone["label_ids"]) % BATCH_SIZE != 0
    for one in together:
        for name in ("predictions", "label_ids", "inputs"):
            assert np.array_equal(one[name], alone[name])
        assert one["num_samples"] == 11 and one["metrics"]["eval_rows"] == 11


def test_the_loss_is_the_same_in_all_processes_and_counts_each_sample_with_its_batchs_mean(
    found: list[dict[str, Any]],
) -> None:
    alone, first, second = (one["classification"] for one in found)
    assert np.array_equal(first["losses"], second["losses"]) and len(first["losses"]) == 11
    # Full batches have the mean that they have alone. The last one is filled up, and its mean is over what fills it.
    assert np.array_equal(first["losses"][:9], alone["losses"][:9])
    assert first["losses"][9] == first["losses"][10] != alone["losses"][10]
    assert first["metrics"]["eval_loss"] == second["metrics"]["eval_loss"]
    assert first["metrics"]["eval_loss"] == pytest.approx(first["losses"].mean())


def test_a_metric_of_single_batches_is_handed_those_of_all_processes(found: list[dict[str, Any]]) -> None:
    alone, *together = (one["batch_by_batch"] for one in found)
    labels = [label for batch, _ in alone for label in batch]
    for one in together:
        assert [is_last for _, is_last in one] == [False, True]
        assert [len(batch) for batch, _ in one] == [2 * BATCH_SIZE, 11 - 2 * BATCH_SIZE]
        assert [label for batch, _ in one for label in batch] == labels


def test_outputs_whose_lengths_differ_between_processes_are_padded(found: list[dict[str, Any]]) -> None:
    (logits, labels), *together = (one["language_model"] for one in found)
    lengths = (labels != -100).sum(axis=1)
    assert len({int(length) for length in lengths}) > 1 and (logits[0] == -100).any()
    for one in together:
        assert np.array_equal(one[0], logits) and np.array_equal(one[1], labels)


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


def test_perplexity_streams_over_all_processes(found: list[dict[str, Any]]) -> None:
    alone, *together = (one["streaming_perplexity"] for one in found)
    assert together == pytest.approx([alone, alone], rel=1e-5)


def test_objects_are_put_one_after_the_other_and_those_that_fill_up_left_out(found: list[dict[str, Any]]) -> None:
    alone, *together = (one["objects"] for one in found)
    expected = [boxes for batch in alone for boxes in batch]
    for one in together:
        assert [len(batch) for batch in one] == [2 * BATCH_SIZE, 8 - 2 * BATCH_SIZE]
        assert [boxes for batch in one for boxes in batch] == expected


def test_nested_tensors_are_padded_to_the_longest_and_gathered_whatever_their_rows(
    found: list[dict[str, Any]],
) -> None:
    _, first, second = (one["pieces"] for one in found)
    for rank, one in enumerate((first, second)):
        tensor, number = one["padded"]["a"]
        assert tensor.shape == (2, 3, 2) and int(number) == rank
        assert (tensor[:, : 2 + rank] == rank).all() and (tensor[:, 2 + rank :] == -100).all()
        assert one["numbers"]["loss"].tolist() == [0.0, 1.0]
        assert one["unequal rows"].tolist() == [[0, 0], [1, 1], [1, 1]]
    assert first["padded at the start"].tolist() == [[0, 7]] and second["padded at the start"].tolist() == [[7, 7]]


def test_objects_keep_their_structure(found: list[dict[str, Any]]) -> None:
    for one in found[1:]:
        text, ranks, mapping = one["pieces"]["objects"]
        assert text == ["text", "text"] and ranks == [0, 1]
        assert torch.equal(mapping["rows"], torch.tensor([[0, -100], [1, 1]]))


def test_one_process_gathers_and_pads_nothing(found: list[dict[str, Any]]) -> None:
    alone = found[0]["pieces"]
    assert alone["padded"]["a"][0].shape == (2, 2, 2) and alone["numbers"]["loss"].shape == ()
    assert alone["objects"][0] == "text"


def test_a_sharded_model_is_evaluated_before_its_training_and_after_it(found: list[dict[str, Any]]) -> None:
    alone, *together = (one["sharded"] for one in found)
    assert alone["shards"] == 0 and all(one["shards"] > 0 for one in together)
    for one in together:
        for result, expected in zip(one["found"], alone["found"], strict=True):
            if isinstance(result, dict):
                measured = {
                    name: value for name, value in result.items() if name.startswith(("eval_share", "eval_loss"))
                }
                assert len(measured) == 4
                assert measured == pytest.approx({name: expected[name] for name in measured}, abs=1e-6)
            else:
                assert np.allclose(result, expected, atol=1e-6)
    before, after = alone["found"][1], alone["found"][3]
    assert not np.allclose(before, after, atol=1e-3)


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
