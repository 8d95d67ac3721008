from __future__ import annotations

import math
from typing import Any

import pytest

from littrainer.callbacks.log_history import EVALUATION
from littrainer.callbacks.state import TrainerState
from littrainer.hub.card.results import MOST_ROWS, metric_tags, results_of, rounded

END = {"train_runtime": 1.0, "train_loss": 0.75, "step": 4, "epoch": 2.0}


def evaluated(step: int, loss: float, **metrics: float) -> dict[str, float]:
    named = {f"eval_{name}": value for name, value in metrics.items()}
    return {
        "eval_loss": loss,
        **named,
        "eval_runtime": 0.1,
        "eval_steps_per_second": 9.0,
        "epoch": step / 2,
        "step": step,
    }


def logged(step: int, loss: float) -> dict[str, float]:
    return {"loss": loss, "grad_norm": 1.0, "learning_rate": 0.1, "epoch": step / 2, "step": step}


def state(*entries: dict[str, float], **changes: Any) -> TrainerState:
    return TrainerState(log_history=list(entries), **changes)


def test_each_evaluation_is_a_row_with_the_training_loss_before_it() -> None:
    found = results_of(
        state(evaluated(1, 3.0, f1=0.1), logged(2, 1.0), evaluated(2, 2.0, f1=0.25), evaluated(4, 1.5, f1=0.5), END)
    )
    assert found.columns == ("Training Loss", "Epoch", "Step", "Validation Loss", "F1")
    assert found.rows == (
        ("No log", "0.5000", "1", "3.0", "0.1000"),
        ("1.0", "1.0", "2", "2.0", "0.2500"),
        ("1.0", "2.0", "4", "1.5000", "0.5000"),
    )
    assert found.metrics == {("loss", EVALUATION): 1.5, ("f1", EVALUATION): 0.5}


def test_an_evaluation_after_training_gives_the_results_and_no_row() -> None:
    found = results_of(state(logged(2, 1.0), evaluated(4, 1.5), END, evaluated(4, 1.25)))
    assert found.metrics == {("loss", EVALUATION): 1.25}
    assert [row[3] for row in found.rows] == ["1.5000"]


def test_the_best_model_has_the_results_of_its_own_evaluation() -> None:
    entries = (logged(2, 1.0), evaluated(2, 0.5), evaluated(4, 1.5), END)
    assert results_of(state(*entries, best_global_step=2), loads_best=True).metrics == {("loss", EVALUATION): 0.5}
    assert results_of(state(*entries, best_global_step=2)).metrics == {("loss", EVALUATION): 1.5}


def test_evaluation_sets_with_metrics_of_their_own_have_columns_of_their_own() -> None:
    hard = {"eval_hard_loss": 4.0, "eval_hard_runtime": 0.1, "step": 2, "epoch": 1.0}
    found = results_of(state(logged(2, 1.0), hard, evaluated(4, 1.5, matthews_correlation=0.5), END))
    assert found.columns[3:] == ("Loss (hard)", "Validation Loss", "Matthews Correlation")
    assert [row[3:] for row in found.rows] == [("4.0", "", ""), ("", "1.5000", "0.5000")]


def test_an_evaluation_without_training_has_results_and_no_table() -> None:
    found = results_of(state(evaluated(0, 1.5)))
    assert found.metrics == {("loss", EVALUATION): 1.5} and found.rows == ()


def test_nothing_logged_means_no_results() -> None:
    assert results_of(state()).metrics == {} and results_of(state(END)).rows == ()


def test_a_long_table_keeps_its_first_and_last_rows_and_tells_how_many_are_left_out() -> None:
    found = results_of(state(*(evaluated(step, 1.0) for step in range(1, 1001)), END))
    assert len(found.rows) == MOST_ROWS and found.left_out == 1000 - MOST_ROWS
    assert found.rows[0][2] == "1" and found.rows[-1][2] == "1000"


def test_the_hub_gets_known_metrics_with_finite_values() -> None:
    found = results_of(state(evaluated(4, 1.5, accuracy=0.75, rouge1=0.5, f1=math.nan, fluency=1.0), END))
    assert metric_tags(found) == {"accuracy": ("Accuracy", 0.75), "rouge": ("Rouge1", 0.5)}


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.123456, "0.1235"), (0.00001234, "1.234e-05"), (0.0, "0.0"), (math.inf, "inf"), (12345.5, "12345.5000")],
)
def test_numbers_keep_four_digits_that_count(value: float, shown: str) -> None:
    assert rounded(value) == shown
