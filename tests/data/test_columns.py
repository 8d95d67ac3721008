from __future__ import annotations

import logging

import pytest
from datasets import Dataset

from littrainer.data.columns import without_extra_columns


def table() -> Dataset:
    return Dataset.from_dict({"input_ids": [[1], [2]], "text": ["a", "b"], "labels": [0, 1], "id": [7, 8]})


def test_columns_that_forward_does_not_take_are_removed_and_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="littrainer")
    kept = without_extra_columns(table(), ["labels", "input_ids", "attention_mask"], "BertModel", "Training")
    assert kept.column_names == ["input_ids", "labels"]
    assert "text, id" in caplog.text and "Training" in caplog.text and "BertModel" in caplog.text


def test_a_dataset_without_extra_columns_is_handed_back_itself() -> None:
    dataset = table()
    assert without_extra_columns(dataset, dataset.column_names, "BertModel", None) is dataset


def test_a_dataset_of_which_nothing_would_be_left_is_refused_with_both_lists() -> None:
    with pytest.raises(ValueError, match=r"(?s)evaluation set.*BertModel.*input_ids, text.*pixel_values") as caught:
        without_extra_columns(table(), ["pixel_values"], "BertModel", "Evaluation")
    assert "remove_unused_columns=False" in str(caught.value)


def test_a_dataset_without_any_column_is_handed_back_itself() -> None:
    dataset = Dataset.from_dict({})
    assert without_extra_columns(dataset, ["x"], "BertModel", None) is dataset
