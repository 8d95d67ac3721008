"""Two processes that share their data: exact resumes, ends, reading by the first, orders, prepared loaders."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import data_process
from tests.distributed.data_process import RESUMED, SIZE
from tests.distributed.together import found_together
from tests.scenarios.data import vector_rows


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found; they are started once for all tests."""
    return found_together(tmp_path_factory, "sharing-data", data_process.__name__)[1]


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_training_ends_in_each_process_as_the_one_that_was_not_broken_off(
    found: list[dict[str, Any]], name: str
) -> None:
    assert [one[f"resumed {name}"] for one in found] == [{}] * SIZE


def test_data_that_is_shorter_in_one_process_is_refused_in_all_with_ranks_and_lengths(
    found: list[dict[str, Any]],
) -> None:
    for one in found:
        assert "rank 0 has 3 batches, rank 1 has 2 batches; rank 0 has 24, rank 1 has 12" in one["a_shorter_dataset"]
        assert "rank 0 has 2 batches, rank 1 has 1 batch. Set even_batches=True" in one["uneven_batches"]


def test_streams_of_unequal_length_end_together_in_training_which_is_told_once(found: list[dict[str, Any]]) -> None:
    together = [one["streams_that_end_apart"] for one in found]
    # Eight rows of the shorter one are one batch where the Trainer shares them, and two in a loader of the script.
    epochs = [(6, pytest.approx(5 + 1 / 6)), (6, pytest.approx(2 + 2 / 6))]
    assert [one["epochs"] for one in together] == [epochs] * SIZE
    for one in together:
        assert [message.partition(",")[0] for message in one["heard"]] == [
            "The data of rank 1 has ended after 1 batch",
            "The data of rank 1 has ended after 2 batches",
        ]


def test_streams_of_unequal_length_are_not_evaluated(found: list[dict[str, Any]]) -> None:
    for one in found:
        message = one["streams_that_end_apart"]["evaluated"]
        assert message.startswith("UnequalData: The data of rank 1 has ended after 1 batch")
        assert "dispatch_batches=True" in message


def test_a_stream_is_read_by_the_first_process_alone(found: list[dict[str, Any]]) -> None:
    assert [one["rows_read_of_a_stream"] for one in found] == [16, 0]


def test_an_error_of_the_stream_ends_all_processes(found: list[dict[str, Any]]) -> None:
    first, second = (one["a_stream_that_fails"] for one in found)
    assert first == "OSError: shard 3 is gone"
    assert second.startswith("FailedElsewhere: Process 0") and first in second


def test_batches_that_are_padded_to_unequal_widths_are_dispatched(found: list[dict[str, Any]]) -> None:
    shapes = [one["batches_of_unequal_width"] for one in found]
    assert [len(one) for one in shapes] == [4, 4] and any(one != other for one, other in zip(*shapes, strict=True))


def test_a_stream_that_each_process_reads_is_predicted_without_repeated_samples(found: list[dict[str, Any]]) -> None:
    labels = [row["labels"] for row in vector_rows(7, seed=1)]
    for one in found:
        predicted, _ = zip(*one["streams_predicted_by_each"], strict=True)
        assert list(predicted) == [labels, labels]
        assert one["streams_predicted_by_each"][1][1] == 7


def test_a_stream_has_one_order_though_the_generators_of_the_processes_differ(found: list[dict[str, Any]]) -> None:
    for one, other in zip(*(each["numbers_of_a_stream"] for each in found), strict=True):
        assert sorted(one + other) == list(range(one[0], one[0] + 8))
