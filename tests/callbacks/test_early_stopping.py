from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from littrainer import EarlyStoppingCallback, TrainerControl, TrainerState
from tests.scenarios.trainers import quiet_trainer

FALLING = [1.0, 0.9, 0.95, 0.91, 0.85, 0.85, 0.845, float("nan"), 0.1]
HALVED = [1.0, 0.5, 0.25, 0.125]
RISING = [0.1, 0.3, 0.31, 0.2, 0.305, 0.5]


def stops(callback: Any, control: Any, state: Any, metrics: list[float], greater_is_better: bool) -> list[Any]:
    """Return the counter and `should_training_stop` after each evaluation."""
    args = SimpleNamespace(metric_for_best_model="quality", greater_is_better=greater_is_better)
    history = []
    for value in metrics:
        callback.on_evaluate(args, state, control, metrics={"eval_quality": value})
        history.append((callback.early_stopping_patience_counter, control.should_training_stop))
        best = state.best_metric
        if best is None or (value > best if greater_is_better else value < best):
            state.best_metric = value
    return history


@pytest.mark.parametrize(("metrics", "greater"), [(FALLING, False), (RISING, True), (FALLING, True), (HALVED, False)])
@pytest.mark.parametrize("patience", [1, 2, 3])
@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.25])
def test_training_stops_at_the_same_evaluation_as_in_transformers(
    metrics: list[float], greater: bool, patience: int, threshold: float
) -> None:
    ours = stops(EarlyStoppingCallback(patience, threshold), TrainerControl(), TrainerState(), metrics, greater)
    theirs = stops(
        transformers.EarlyStoppingCallback(patience, threshold),
        transformers.TrainerControl(),
        transformers.TrainerState(),
        metrics,
        greater,
    )
    assert ours == theirs


@pytest.mark.parametrize(
    ("changes", "missing"),
    [({"eval_strategy": "steps"}, "metric_for_best_model"), ({"metric_for_best_model": "loss"}, "eval_strategy")],
)
def test_early_stopping_without_a_metric_or_evaluation_is_refused_before_the_first_step(
    tmp_path: Path, changes: dict[str, Any], missing: str
) -> None:
    trainer = quiet_trainer(tmp_path, trainer_kwargs={"callbacks": [EarlyStoppingCallback()]}, max_steps=2, **changes)
    with pytest.raises(ValueError, match=f"EarlyStoppingCallback.*{missing}"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_an_evaluation_without_the_metric_is_ignored_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    callback, control = EarlyStoppingCallback(), TrainerControl()
    args = SimpleNamespace(metric_for_best_model="quality", greater_is_better=True)
    for _ in range(2):
        callback.on_evaluate(args, TrainerState(best_metric=9.0), control, metrics={"eval_loss": 1.0})
    assert not control.should_training_stop and callback.early_stopping_patience_counter == 0
    assert "eval_quality" in caplog.text and "eval_loss" in caplog.text
    assert len(caplog.records) == 2


def test_early_stopping_without_load_best_model_at_end_warns(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"metric_for_best_model": "loss", "eval_strategy": "steps"}
    for loads_best in (True, False):
        args = SimpleNamespace(**settings, load_best_model_at_end=loads_best)
        EarlyStoppingCallback().on_train_begin(args, TrainerState(), TrainerControl())
        assert ("load_best_model_at_end=True" in caplog.text) is not loads_best


EVERY_STEP = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}


# Fidelity scenarios resume with the argument restore_callback_states_from_checkpoint set to either value.
def test_a_resumed_training_continues_with_the_remaining_patience(tmp_path: Path) -> None:
    def train(max_steps: int, **resume: Any) -> int:
        kwargs = {
            "callbacks": [EarlyStoppingCallback(early_stopping_patience=3)],
            "compute_metrics": lambda _: {"score": 0.5},
        }
        trainer = quiet_trainer(
            tmp_path, trainer_kwargs=kwargs, **EVERY_STEP, metric_for_best_model="score", max_steps=max_steps
        )
        trainer.train(**resume)
        return trainer.state.global_step

    assert train(3) == 3
    assert train(20, resume_from_checkpoint=True) == 4
