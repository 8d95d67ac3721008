from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from littrainer.data import stream_end
from littrainer.data.stream_end import UnequalData
from littrainer.lightning.evaluation import is_monitored
from tests.lightning_users.fitting import loader, make_module, make_trainer, validate


def test_metrics_have_the_prefix_of_their_stage_and_others_than_numbers_are_named() -> None:
    metrics = {"eval_a": 1.0, "val_b": True, "acc": 2.0, "text": "a"}
    with pytest.warns(UserWarning) as warned:
        logged = validate(make_module(compute_metrics=lambda prediction: metrics), {"near": loader()})
    assert {name: logged[f"val_near_{name}"] for name in ("a", "b", "acc")} == {
        "a": 1.0,
        "b": 1.0,
        "acc": 2.0,
    }
    assert len(logged) == 4
    texts = "".join(str(warning.message) for warning in warned)
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
def test_a_metric_is_monitored_by_callbacks_that_name_it(callback: object, expected: bool) -> None:
    assert is_monitored("train_loss", [callback]) is expected


@pytest.fixture
def a_second_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a second process with a batch less."""
    monkeypatch.setattr(stream_end, "is_distributed", lambda: True)
    monkeypatch.setattr(
        stream_end, "all_gather_object", lambda first: [first, (first[0] - 1 if first[0] else None, *first[1:])]
    )


@pytest.mark.usefixtures("a_second_process")
@pytest.mark.parametrize(("evaluate", "stage"), [("validate", "validation"), ("test", "test")])
def test_unequal_loaders_of_several_processes_are_refused(evaluate: str, stage: str) -> None:
    with pytest.raises(UnequalData, match=f"data of a {stage} does not give.*rank 0 has 3 batches, rank 1 has 2"):
        getattr(make_trainer(), evaluate)(make_module(), loader(), verbose=False)


@pytest.mark.usefixtures("a_second_process")
def test_batches_beyond_limits_or_of_streams_are_not_compared() -> None:
    stream: Any = iter(list(loader()))
    assert "val_loss" in validate(make_module(), stream)
    with pytest.raises(UnequalData, match="rank 0 has 2 batches, rank 1 has 1 batch"):
        make_trainer(limit_val_batches=2).validate(make_module(), loader(), verbose=False)
