import logging
from typing import Any

import numpy as np
import pytest
import torch

from littrainer.tracking import metric_names
from littrainer.tracking.metric_names import as_number, only_numbers, with_tracked_names

NAMES = {
    "loss": 1.0,
    "eval_loss": 2.0,
    "eval_first_accuracy": 3.0,
    "test_runtime": 4.0,
    "train_loss": 5.0,
    "evaluation": 6.0,
    "eval_": 7.0,
}


def test_metrics_have_the_names_that_transformers_gives_them() -> None:
    from transformers.integrations.integration_utils import rewrite_logs

    assert with_tracked_names(NAMES) == rewrite_logs(NAMES)
    assert list(with_tracked_names({"eval_loss": 0, "loss": 0})) == ["eval/loss", "train/loss"]


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3),
        (0.5, 0.5),
        (True, True),
        (torch.tensor(1.5), 1.5),
        (torch.tensor([2]), 2),
        (np.float32(0.25), 0.25),
        (np.int64(7), 7),
        (np.array([4.0]), 4.0),
        ("text", None),
        (None, None),
        ([1.0], None),
        (torch.ones(2), None),
        (torch.tensor(1j), None),
        (np.array(["a"]), None),
        (int, None),
    ],
    ids=str,
)
def test_tensors_and_arrays_of_one_number_are_numbers(value: Any, number: Any) -> None:
    assert as_number(value) == number


def test_values_that_are_not_finite_stay() -> None:
    assert str(only_numbers({"a": float("nan"), "b": torch.tensor(float("inf"))}, "x")) == "{'a': nan, 'b': inf}"


def test_what_is_no_number_is_named_once_for_each_service(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_names, "_told", set())
    with caplog.at_level(logging.WARNING):
        for service in ("one", "one", "two"):
            assert only_numbers({"kept": 1, "matrix": [[1]]}, service) == {"kept": 1}
    assert [record.getMessage() for record in caplog.records] == [
        f"{service}: the logged value 'matrix' is left out, since it is a list and no number: [[1]]."
        for service in ("one", "two")
    ]
