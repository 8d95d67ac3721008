from __future__ import annotations

import pytest

from littrainer.plain_lightning.names import loader_at, monitored_name, numbers_in, prefix_and_suffix, with_prefix


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
