from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from littrainer.data import stream_end
from littrainer.data.stream_end import UnequalData
from littrainer.lightning.evaluation import is_monitored
from tests.lightning_users.fitting import loader, module_of, trainer_for, validated


def test_metrics_have_the_prefix_of_their_stage_once_and_those_that_are_no_numbers_are_named() -> None:
    metrics = {"eval_a": 1.0, "val_b": True, "acc": 2.0, "text": "a"}
    with pytest.warns(UserWarning) as warned:
        found = validated(module_of(compute_metrics=lambda prediction: metrics), {"near": loader()})
    assert {name: found[f"val_near_{name}"] for name in ("a", "b", "acc")} == {"a": 1.0, "b": 1.0, "acc": 2.0}
    assert len(found) == 4
    texts = "".join(str(one.message) for one in warned)
    assert "Metrics that are no numbers are not logged: val_near_text" in texts


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
    assert is_monitored("train_loss", [callback]) is expected


@pytest.fixture
def a_second_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has a batch less of everything."""
    monkeypatch.setattr(stream_end, "is_distributed", lambda: True)
    monkeypatch.setattr(stream_end, "all_gather_object", lambda own: [own, (own[0] - 1 if own[0] else None, *own[1:])])


@pytest.mark.usefixtures("a_second_process")
@pytest.mark.parametrize(("evaluate", "what"), [("validate", "validation"), ("test", "test")])
def test_unequal_loaders_of_several_processes_are_refused_before_they_wait_for_ever(evaluate: str, what: str) -> None:
    with pytest.raises(UnequalData, match=f"data of a {what} does not give.*rank 0 has 3 batches, rank 1 has 2"):
        getattr(trainer_for(), evaluate)(module_of(), loader(), verbose=False)


@pytest.mark.usefixtures("a_second_process")
def test_batches_that_are_left_out_or_cannot_be_counted_are_not_compared() -> None:
    stream: Any = iter(list(loader()))
    assert "val_loss" in validated(module_of(), stream)
    with pytest.raises(UnequalData, match="rank 0 has 2 batches, rank 1 has 1 batch"):
        trainer_for(limit_val_batches=2).validate(module_of(), loader(), verbose=False)
