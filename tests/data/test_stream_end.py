from __future__ import annotations

import logging
from typing import Any

import pytest

from littrainer.data import stream_end as ends
from littrainer.data.stream_end import StreamEndSync, UnequalData, check_equal_lengths


class Sized:
    def __init__(self, length: int | None, dataset: Any = None):
        self.length = length
        self.dataset = dataset

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("no length")
        return self.length


def set_gathered_values(monkeypatch: pytest.MonkeyPatch, values: list[Any]) -> None:
    monkeypatch.setattr(ends, "is_distributed", lambda: True)
    monkeypatch.setattr(ends, "all_gather_object", lambda local: values)


def test_equal_and_unknown_lengths_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for length in (3, None):
        set_gathered_values(monkeypatch, [(length, 12, ""), (length, 10, "")])
        check_equal_lengths(Sized(length), "training data")


@pytest.mark.parametrize(
    ("lengths", "call", "words"),
    [
        ([(3, 9, ""), (None, 9, "")], "", "rank 0 has 3 batches, rank 1 has an unknown number of batches"),
        (
            [(1, 3, "predict"), (1, 7, "evaluate")],
            "predict",
            "not evaluate the same: rank 0 has pred.*, rank 1 has eval",
        ),
        # Equally many batches with different numbers of samples.
        ([(1, 3, "evaluate"), (1, 7, "evaluate")], "evaluate", "rank 0 has 3, rank 1 has 7 samples"),
    ],
)
def test_unequal_data_is_refused_by_rank(
    monkeypatch: pytest.MonkeyPatch, lengths: list[Any], call: str, words: str
) -> None:
    set_gathered_values(monkeypatch, lengths)
    with pytest.raises(UnequalData, match=words):
        check_equal_lengths(Sized(3), "data", call)


def test_all_streams_end_with_the_shortest_and_a_single_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    end = StreamEndSync()
    monkeypatch.setattr(ends, "all_gather_object", lambda local: [local, True])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            end.begin()
            monkeypatch.setattr(ends, "any_rank", lambda local: local)
            assert not end.any_rank_exhausted(False, is_training=True)
            monkeypatch.setattr(ends, "any_rank", lambda local: True)
            assert end.any_rank_exhausted(False, is_training=True)
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "The data of rank 1 has ended after 1 batch"
    ]


def test_streams_that_end_together_give_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ends, "any_rank", lambda local: local)
    monkeypatch.setattr(ends, "all_gather_object", lambda local: [local, local])
    assert StreamEndSync().any_rank_exhausted(True, is_training=False) and not caplog.records
