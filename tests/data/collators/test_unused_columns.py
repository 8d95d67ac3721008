from __future__ import annotations

import logging

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
