"""Hyperparameter searches of two processes: both train each trial with the draws of the first."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from tests.fidelity.cases.search import EACH_EPOCH, certainty, rate_and_decay, recorded, searching_trainer
from tests.fidelity.record import Record
from tests.fidelity.registry import scenario
from tests.fidelity.side import Side
from tests.scenarios.models import VectorClassifier


def searched_by_two(side: Side, trainer: Any, hp_space: Any = rate_and_decay, **keywords: Any) -> Record:
    """Search; then train with the best parameters."""
    import optuna

    sampler = optuna.samplers.TPESampler(seed=3, n_startup_trials=2)
    results = trainer.hyperparameter_search(
        hp_space=hp_space, backend="optuna", sampler=sampler, n_trials=2, **keywords
    )
    # transformers returns None but in the first process.
    best = [tuple(results) if results is not None else None]
    dist.broadcast_object_list(best, src=0)
    assert best[0] is not None
    for name, value in best[0][2].items():
        if hasattr(trainer.args, name):
            setattr(trainer.args, name, value)
    output = trainer.train()
    return recorded(side, trainer, output, {"found": best[0]})


@scenario(extra=True, saves=True, processes=2)
def two_processes_that_search_and_load_the_best_model_of_each_trial(side: Side) -> Record:
    arguments = {**EACH_EPOCH, "load_best_model_at_end": True, "metric_for_best_model": "certainty"}
    trainer = searching_trainer(side, arguments=arguments, compute_metrics=certainty)
    return searched_by_two(side, trainer, direction="maximize")


@scenario(extra=True, processes=2)
def two_processes_that_search_for_the_shape_of_the_model(side: Side) -> Record:
    def model_of(trial: Any) -> nn.Module:
        return VectorClassifier(8 if trial is None else trial.suggest_categorical("hidden", [4, 6]))

    def space(trial: Any) -> dict[str, Any]:
        return {
            "learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-1, log=True),
            "gradient_accumulation_steps": trial.suggest_int("gradient_accumulation_steps", 1, 2),
            "lr_scheduler_type": trial.suggest_categorical("lr_scheduler_type", ["cosine", "constant"]),
            "hidden": trial.suggest_categorical("hidden", [4, 6]),
            "seed": trial.suggest_int("seed", 1, 40),
        }

    return searched_by_two(side, searching_trainer(side, model_init=model_of, arguments={}), hp_space=space)
