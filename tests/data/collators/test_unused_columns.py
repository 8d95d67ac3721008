from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

from littrainer.data.collators import RemoveColumnsCollator


def test_columns_the_model_does_not_take_never_reach_the_collator() -> None:
    collator = RemoveColumnsCollator(lambda samples: samples, ["x", "labels"])
    assert collator([{"x": 1, "text": "a"}, {"labels": 2, "id": 3, "x": 4}]) == [{"x": 1}, {"labels": 2, "x": 4}]


def test_samples_that_are_no_dicts_reach_the_collator_as_they_are() -> None:
    assert RemoveColumnsCollator(tuple, ["x"])([1, "text", (2, 3)]) == (1, "text", (2, 3))


def test_dropped_columns_are_named_once_with_model_and_set(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    collator = RemoveColumnsCollator(list, ["x"], logging.getLogger("columns"), "BertModel", "training")
    for _ in range(2):
        collator([{"x": 1, "text": "a", "id": 2}])
    (record,) = caplog.records
    for word in ("training", "BertModel", "id, text", "remove_unused_columns=False"):
        assert word in record.getMessage()


def test_a_collator_may_take_entries_out_of_its_samples_without_changing_the_data() -> None:
    rows = [{"x": 1}, {"x": 2, "text": "a"}]
    RemoveColumnsCollator(lambda samples: [sample.pop("x") for sample in samples], ["x"])(rows)
    assert rows == [{"x": 1}, {"x": 2, "text": "a"}]


def test_every_column_that_was_dropped_is_remembered() -> None:
    collator = RemoveColumnsCollator(list, ["x"])
    collator([{"x": 1, "text": "a"}, {"x": 1}])
    collator([{"x": 1, "id": 2}])
    assert list(collator.dropped) == ["text", "id"]


def test_dropping_nothing_makes_no_call_for_each_sample() -> None:
    calls: list[str] = []

    def noted(frame: Any, event: str, _: Any) -> None:
        calls.extend([frame.f_code.co_name] if event == "call" else [])

    collator = RemoveColumnsCollator(list, ["x", "labels"])
    rows = [{"x": number} for number in range(32)]
    sys.setprofile(noted)
    try:
        collator(rows)
    finally:
        sys.setprofile(None)
    assert len(calls) < 4
