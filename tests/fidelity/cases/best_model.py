"""When a run saves, which checkpoint it takes for the best, which it keeps, and which model it ends with."""

from __future__ import annotations

from typing import Any

from tests.fidelity.cases.callbacks import raising
from tests.fidelity.record import Record
from tests.fidelity.registry import Script, add_scripts
from tests.fidelity.side import Side

RISING_AND_FALLING = (0.2, 0.7, 0.4, 0.7, 0.9, 0.1, 0.3, 0.95, 0.5, 0.6)


def make_script(*flags: tuple[str, int, str], scores: tuple[float, ...] = RISING_AND_FALLING, **changes: Any) -> Script:
    """Return a script that trains two epochs of five steps.

    Parameters:
        flags: The event, the step and the flag of each callback of `raising`.
        scores: The metric `score` of each evaluation.
    """

    def script(side: Side) -> Record:
        remaining = iter(scores)
        trainer = side.vector_trainer(
            eval_rows=5,
            compute_metrics=lambda _: {"score": next(remaining)},
            callbacks=[raising(side, *flag) for flag in flags],
            **{"learning_rate": 0.1, "metric_for_best_model": "score", **changes},
        )
        return side.train(trainer)

    return script


EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}
EACH_STEP: dict[str, Any] = {**EVALUATED, "save_strategy": "steps", "save_steps": 1}
EACH_EPOCH: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch"}
LOADED: dict[str, Any] = {"load_best_model_at_end": True}

add_scripts(
    {
        "best_model_of_each_step_loaded_and_kept_alone": make_script(**EACH_STEP, **LOADED, save_total_limit=1),
        "best_model_kept_beside_the_two_last": make_script(
            **EACH_STEP, **LOADED, scores=(0.9, *[0.1] * 9), save_total_limit=2
        ),
        "best_model_is_the_one_with_the_smallest_value": make_script(
            **EACH_STEP, **LOADED, greater_is_better=False, save_total_limit=2
        ),
        "best_model_of_each_epoch_loaded": make_script(
            **EACH_EPOCH, **LOADED, scores=(0.9, 0.3), metric_for_best_model="eval_score"
        ),
        "best_model_by_loss_where_no_metric_is_named": make_script(
            **EACH_STEP, **LOADED, metric_for_best_model=None, save_total_limit=2
        ),
        "saves_are_rarer_than_evaluations": make_script(**EVALUATED, **LOADED, save_strategy="steps", save_steps=4),
        "saved_only_where_it_is_the_best": make_script(**EVALUATED, **LOADED, save_strategy="best"),
        "saved_only_where_it_is_the_best_of_the_epochs": make_script(
            scores=(0.4, 0.3, 0.6), num_train_epochs=3, eval_strategy="epoch", save_strategy="best", save_total_limit=1
        ),
        "best_model_loaded_where_only_models_are_saved": make_script(
            **EACH_STEP, **LOADED, save_only_model=True, save_total_limit=2
        ),
        "best_is_noted_though_it_is_not_loaded": make_script(**EACH_STEP, save_total_limit=1),
        "last_step_saved_though_it_is_no_multiple": make_script(
            save_strategy="steps", save_steps=3, max_steps=7, save_on_each_node=True
        ),
        "saved_where_callbacks_ask_for_it": make_script(
            ("on_substep_end", 1, "should_save"),
            ("on_epoch_end", 3, "should_save"),
            ("on_train_end", 6, "should_save"),
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=2,
        ),
        "stopped_at_an_evaluation_that_is_saved": make_script(
            ("on_evaluate", 4, "should_training_stop"), **EACH_STEP, **LOADED
        ),
        "stopped_when_it_was_saved": make_script(("on_save", 4, "should_training_stop"), **EACH_STEP, **LOADED),
        "saved_at_epochs_and_stopped_within_one": make_script(
            ("on_step_end", 3, "should_training_stop"), **EACH_EPOCH, **LOADED
        ),
    },
    saves=True,
)
add_scripts({"best_is_noted_though_nothing_is_saved": make_script(eval_strategy="steps", eval_steps=2)})
