from __future__ import annotations

import logging
from typing import Any

import pytest

from littrainer.data import stream_end as ends
from littrainer.data.stream_end import CommonEnd, UnequalData, check_equal_lengths


class Sized:
    def __init__(self, length: int | None, dataset: Any = None):
        self.length = length
        self.dataset = dataset

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("no length")
        return self.length


def let_processes_have(monkeypatch: pytest.MonkeyPatch, values: list[Any]) -> None:
    monkeypatch.setattr(ends, "are_several", lambda: True)
    monkeypatch.setattr(ends, "from_each", lambda own: values)


def test_equal_and_unknown_lengths_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for length in (3, None):
        let_processes_have(monkeypatch, [(length, 12, ""), (length, 10, "")])
        check_equal_lengths(Sized(length), "training data")


def test_a_length_that_one_process_alone_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    let_processes_have(monkeypatch, [(3, 9, ""), (None, 9, "")])
    with pytest.raises(UnequalData, match="rank 0 has 3 batches, rank 1 has an unknown number of batches"):
        check_equal_lengths(Sized(3), "training data")


def test_processes_at_different_evaluations_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    let_processes_have(monkeypatch, [(1, 3, "prediction"), (1, 7, "evaluation")])
    with pytest.raises(UnequalData, match="do not evaluate the same: rank 0 has prediction, rank 1 has evaluation"):
        check_equal_lengths(Sized(1), "prediction data", "prediction")


def test_evaluations_of_differently_many_samples_are_refused_though_their_batches_are_as_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_processes_have(monkeypatch, [(1, 3, "evaluation"), (1, 7, "evaluation")])
    with pytest.raises(UnequalData, match="rank 0 has 3, rank 1 has 7 samples"):
        check_equal_lengths(Sized(1), "evaluation data", "evaluation")


def test_an_end_counts_for_all_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    end = CommonEnd()
    monkeypatch.setattr(ends, "from_each", lambda own: [own, True])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            end.begin()
            monkeypatch.setattr(ends, "agreed", lambda own: own)
            assert not end.is_reached(False, is_training=True)
            monkeypatch.setattr(ends, "agreed", lambda own: True)
            assert end.is_reached(False, is_training=True)
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "The data of rank 1 has ended after 1 batch"
    ]


def test_an_end_of_all_is_nothing_to_tell(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(ends, "agreed", lambda own: own)
    monkeypatch.setattr(ends, "from_each", lambda own: [own, own])
    assert CommonEnd().is_reached(True, is_training=False) and not caplog.records
