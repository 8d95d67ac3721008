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


def let_processes_have(monkeypatch: pytest.MonkeyPatch, values: list[Any]) -> None:
    monkeypatch.setattr(ends, "is_distributed", lambda: True)
    monkeypatch.setattr(ends, "all_gather_object", lambda own: values)


def test_equal_and_unknown_lengths_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for length in (3, None):
        let_processes_have(monkeypatch, [(length, 12, ""), (length, 10, "")])
        check_equal_lengths(Sized(length), "training data")


@pytest.mark.parametrize(
    ("everywhere", "call", "words"),
    [
        ([(3, 9, ""), (None, 9, "")], "", "rank 0 has 3 batches, rank 1 has an unknown number of batches"),
        (
            [(1, 3, "predict"), (1, 7, "evaluate")],
            "predict",
            "not evaluate the same: rank 0 has pred.*, rank 1 has eval",
        ),
        # As many batches, of differently many samples.
        ([(1, 3, "evaluate"), (1, 7, "evaluate")], "evaluate", "rank 0 has 3, rank 1 has 7 samples"),
    ],
)
def test_data_that_is_not_the_same_length_everywhere_is_refused_by_rank(
    monkeypatch: pytest.MonkeyPatch, everywhere: list[Any], call: str, words: str
) -> None:
    let_processes_have(monkeypatch, everywhere)
    with pytest.raises(UnequalData, match=words):
        check_equal_lengths(Sized(3), "data", call)


def test_an_end_counts_for_all_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    end = StreamEndSync()
    monkeypatch.setattr(ends, "all_gather_object", lambda own: [own, True])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            end.begin()
            monkeypatch.setattr(ends, "any_rank", lambda own: own)
            assert not end.any_rank_exhausted(False, is_training=True)
            monkeypatch.setattr(ends, "any_rank", lambda own: True)
            assert end.any_rank_exhausted(False, is_training=True)
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "The data of rank 1 has ended after 1 batch"
    ]


def test_an_end_of_all_is_nothing_to_tell(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(ends, "any_rank", lambda own: own)
    monkeypatch.setattr(ends, "all_gather_object", lambda own: [own, own])
    assert StreamEndSync().any_rank_exhausted(True, is_training=False) and not caplog.records
