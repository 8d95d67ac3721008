from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from littrainer.data import stream_end
from littrainer.data.stream_end import UnequalData
from littrainer.lightning.evaluation import (
    Evaluations,
    is_watched,
    numbers_in,
    with_prefix,
    with_prefixes,
)
from tests.lightning_users.fitting import loader, module_of, trainer_for


@pytest.mark.parametrize("name", ["accuracy", "eval_accuracy", "val_accuracy", "test_accuracy"])
def test_a_metric_has_the_prefix_of_its_stage_once(name: str) -> None:
    assert with_prefix("val", name) == "val_accuracy"


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


@pytest.fixture
def a_second_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has a batch less of everything."""
    monkeypatch.setattr(stream_end, "are_several", lambda: True)
    monkeypatch.setattr(stream_end, "from_each", lambda own: [own, (own[0] - 1 if own[0] else None, *own[1:])])


@pytest.mark.usefixtures("a_second_process")
@pytest.mark.parametrize(("evaluate", "what"), [("validate", "validation"), ("test", "test")])
def test_unequal_loaders_of_several_processes_are_refused_before_they_wait_for_ever(evaluate: str, what: str) -> None:
    with pytest.raises(UnequalData, match=f"data of a {what} does not give.*rank 0 has 3 batches, rank 1 has 2"):
        getattr(trainer_for(), evaluate)(module_of(), loader(), verbose=False)


@pytest.mark.usefixtures("a_second_process")
def test_batches_that_are_left_out_or_cannot_be_counted_are_not_compared() -> None:
    stream = (batch for batch in list(loader()))
    assert "val_loss" in trainer_for().validate(module_of(), stream, verbose=False)[0]
    with pytest.raises(UnequalData, match="rank 0 has 2 batches, rank 1 has 1 batch"):
        trainer_for(limit_val_batches=2).validate(module_of(), loader(), verbose=False)


def test_a_copy_does_not_go_on_with_the_evaluation_at_hand() -> None:
    evaluations = Evaluations(None)
    evaluations._waiting["val_loss"] = 1.0
    state: Any = evaluations.__getstate__()
    assert state["_waiting"] == {} and state["_round"] is None
