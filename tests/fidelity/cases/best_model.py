"""When a run saves, which checkpoint it takes for the best, which it keeps, and which model it ends with."""

from __future__ import annotations

from typing import Any

from tests.fidelity.cases.callbacks import raising
from tests.fidelity.record import Record
from tests.fidelity.registry import scenario
from tests.fidelity.side import Side
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier

RISING_AND_FALLING = (0.2, 0.7, 0.4, 0.7, 0.9, 0.1, 0.3, 0.95, 0.5, 0.6)


def saved(side: Side, *callbacks: Any, scores: tuple[float, ...] = RISING_AND_FALLING, **changes: Any) -> Record:
    """Train two epochs of five steps; the evaluations give the metric `score` the values of `scores`, one by one."""
    left = iter(scores)
    changes = {"metric_for_best_model": "score", **changes}
    return side.train(
        side.Trainer(
            model=VectorClassifier(),
            args=side.arguments(learning_rate=0.1, **changes),
            train_dataset=Rows(vector_rows(18)),
            eval_dataset=Rows(vector_rows(5, seed=1)),
            compute_metrics=lambda _: {"score": next(left)},
            callbacks=[*callbacks, side.watcher],
        )
    )


EACH_STEP: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}


@scenario(saves=True)
def best_model_of_each_step_loaded_and_kept_alone(side: Side) -> Record:
    return saved(side, **EACH_STEP, load_best_model_at_end=True, save_total_limit=1)


@scenario(saves=True)
def best_model_kept_beside_the_two_last(side: Side) -> Record:
    return saved(side, scores=(0.9, *[0.1] * 9), **EACH_STEP, load_best_model_at_end=True, save_total_limit=2)


@scenario(saves=True)
def best_model_is_the_one_with_the_smallest_value(side: Side) -> Record:
    return saved(side, **EACH_STEP, load_best_model_at_end=True, greater_is_better=False, save_total_limit=2)


@scenario(saves=True)
def best_model_of_each_epoch_loaded(side: Side) -> Record:
    return saved(
        side,
        scores=(0.9, 0.3),
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="eval_score",
    )


@scenario(saves=True)
def best_model_by_loss_where_no_metric_is_named(side: Side) -> Record:
    return saved(side, **EACH_STEP, load_best_model_at_end=True, metric_for_best_model=None, save_total_limit=2)


@scenario(saves=True)
def saves_are_rarer_than_evaluations(side: Side) -> Record:
    return saved(
        side, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=4, load_best_model_at_end=True
    )


@scenario(saves=True)
def saved_only_where_it_is_the_best(side: Side) -> Record:
    return saved(side, eval_strategy="steps", eval_steps=1, save_strategy="best", load_best_model_at_end=True)


@scenario(saves=True)
def saved_only_where_it_is_the_best_of_the_epochs(side: Side) -> Record:
    return saved(
        side,
        scores=(0.4, 0.3, 0.6),
        num_train_epochs=3,
        eval_strategy="epoch",
        save_strategy="best",
        save_total_limit=1,
    )


@scenario(saves=True)
def best_model_loaded_where_only_models_are_saved(side: Side) -> Record:
    return saved(side, **EACH_STEP, load_best_model_at_end=True, save_only_model=True, save_total_limit=2)


@scenario(saves=True)
def best_is_noted_though_it_is_not_loaded(side: Side) -> Record:
    return saved(side, **EACH_STEP, save_total_limit=1)


@scenario()
def best_is_noted_though_nothing_is_saved(side: Side) -> Record:
    return saved(side, eval_strategy="steps", eval_steps=2)


@scenario(saves=True)
def save_steps_given_as_a_fraction(side: Side) -> Record:
    return saved(side, save_strategy="steps", save_steps=0.35)


@scenario(saves=True)
def last_step_saved_though_it_is_no_multiple(side: Side) -> Record:
    return saved(side, save_strategy="steps", save_steps=3, max_steps=7, save_on_each_node=True)


@scenario(saves=True)
def saved_where_callbacks_ask_for_it(side: Side) -> Record:
    return saved(
        side,
        raising(side, "on_substep_end", 1, "should_save"),
        raising(side, "on_epoch_end", 3, "should_save"),
        raising(side, "on_train_end", 6, "should_save"),
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
    )


@scenario(saves=True)
def stopped_at_an_evaluation_that_is_saved(side: Side) -> Record:
    return saved(
        side, raising(side, "on_evaluate", 4, "should_training_stop"), **EACH_STEP, load_best_model_at_end=True
    )


@scenario(saves=True)
def stopped_when_it_was_saved(side: Side) -> Record:
    return saved(side, raising(side, "on_save", 4, "should_training_stop"), **EACH_STEP, load_best_model_at_end=True)


@scenario(saves=True)
def saved_at_epochs_and_stopped_within_one(side: Side) -> Record:
    return saved(
        side,
        raising(side, "on_step_end", 3, "should_training_stop"),
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
    )
