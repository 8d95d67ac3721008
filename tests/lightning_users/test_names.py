from __future__ import annotations

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from littrainer.lightning.names import (
    is_watched,
    loader_at,
    monitored_name,
    numbers_in,
    prefix_and_suffix,
    with_prefix,
    with_prefixes,
)


@pytest.mark.parametrize("name", ["accuracy", "eval_accuracy", "val_accuracy", "test_accuracy"])
def test_a_metric_has_the_prefix_of_its_stage_once(name: str) -> None:
    assert with_prefix("val", name) == "val_accuracy"


@pytest.mark.parametrize(
    ("loaders", "expected"),
    [
        ("one", ("val", "")),
        (["one"], ("val", "")),
        (["one", "two"], ("val", "/dataloader_idx_1")),
        ({"near": "one", "far": "two"}, ("val_far", "")),
    ],
)
def test_several_loaders_are_told_apart(loaders: object, expected: tuple[str, str]) -> None:
    index = 1 if len(loaders) == 2 else 0  # type: ignore[arg-type]
    assert prefix_and_suffix("val", loaders, index) == expected
    assert loader_at(loaders, index) in ("one", "two")


@pytest.mark.parametrize(
    ("metric", "expected"), [(None, "val_loss"), ("loss", "val_loss"), ("eval_f1", "val_f1"), ("f1", "val_f1")]
)
def test_a_schedule_follows_the_logged_name(metric: str | None, expected: str) -> None:
    assert monitored_name(metric) == expected


def test_truth_values_and_numbers_are_logged_and_others_named() -> None:
    with pytest.warns(UserWarning, match="val_text, val_list"):
        found = numbers_in({"val_loss": 1, "val_good": True, "val_text": "a", "val_list": [1]})
    assert found == {"val_loss": 1.0, "val_good": 1.0}


def test_metrics_that_are_logged_under_one_name_are_named() -> None:
    with pytest.warns(UserWarning, match=r"test_acc, acc are all logged as val_near_acc"):
        found = with_prefixes("val_near", "", {"test_acc": 1.0, "acc": 2.0, "loss": 3.0})
    assert found == {"val_near_acc": 2.0, "val_near_loss": 3.0}


@pytest.mark.parametrize(
    ("callback", "expected"),
    [
        (EarlyStopping("train_loss"), True),
        (EarlyStopping("val_loss"), False),
        (ModelCheckpoint(filename="{step}-{train_loss:.2f}"), True),
        (ModelCheckpoint(), False),
    ],
)
def test_a_number_is_watched_where_a_callback_goes_by_it(callback: object, expected: bool) -> None:
    assert is_watched("train_loss", [callback]) is expected
