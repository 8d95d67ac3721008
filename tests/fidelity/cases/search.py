"""Hyperparameter searches with Optuna: each trial's draws, training, reports and files."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.fidelity.record import Record, plain
from tests.fidelity.registry import scenario
from tests.fidelity.side import Side
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import NoisyClassifier, VectorClassifier

STALE_CONTROL = "stateful_callbacks"
"""Until it is saved a state holds here the control of the training before; ours begins each trial without it."""

EACH_EPOCH: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch"}


def rate_and_decay(trial: Any) -> dict[str, Any]:
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
        "weight_decay": trial.suggest_float("weight_decay", 0.0, 0.3),
    }


def certainty(prediction: Any) -> dict[str, float]:
    return {"certainty": float(prediction.predictions.max(-1).mean())}


def searching_trainer(side: Side, **changes: Any) -> Any:
    """A Trainer that can search, with a callback that keeps what the state of each training was at its end."""

    class Keeping(side.names.TrainerCallback):
        def __init__(self) -> None:
            self.states: list[Any] = []

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.states.append(plain({name: value for name, value in vars(state).items() if name != STALE_CONTROL}))

    keeping = Keeping()
    arguments = changes.pop("arguments", {"eval_strategy": "epoch"})
    keywords: dict[str, Any] = {
        "model_init": lambda: VectorClassifier(),
        "train_dataset": Rows(vector_rows(18)),
        "eval_dataset": Rows(vector_rows(7, seed=1)),
        **changes,
    }
    trainer = keywords.pop("kind", side.Trainer)(
        args=side.arguments(**arguments), callbacks=[keeping, side.watcher], **keywords
    )
    trainer.states_at_the_ends = keeping.states
    return trainer


def searched(side: Side, trainer: Any, hp_space: Any = rate_and_decay, sampler: Any = None, **keywords: Any) -> Record:
    """Search with a storage in memory; then train with the best parameters, as the documentation of Optuna has it."""
    import optuna

    storage = keywords.pop("storage", None) or optuna.storages.InMemoryStorage()
    results = trainer.hyperparameter_search(
        hp_space=hp_space,
        backend="optuna",
        storage=storage,
        study_name="search",
        sampler=sampler or optuna.samplers.TPESampler(seed=3, n_startup_trials=2),
        **keywords,
    )
    study = optuna.load_study(study_name="search", storage=storage)
    best = results[0] if isinstance(results, list) else results
    for name, value in best.hyperparameters.items():
        if hasattr(trainer.args, name):
            setattr(trainer.args, name, value)
    output = trainer.train()
    trials = [
        (trial.number, trial.state.name, trial.values, trial.params, trial.intermediate_values)
        for trial in study.trials
    ]
    runs = [tuple(run) for run in results] if isinstance(results, list) else tuple(results)
    return recorded(side, trainer, output, {"found": runs, "trials": trials})


def recorded(side: Side, trainer: Any, output: Any, extra: dict[str, Any]) -> Record:
    """The record of a search and a later training, without values that our trials do not inherit."""
    trainer.state.stateful_callbacks.clear()
    forget_evaluation_loaders(side)
    return side.record(trainer, output, extra={**extra, "states": trainer.states_at_the_ends})


def forget_evaluation_loaders(side: Side) -> None:
    """Remove evaluation loaders from the arguments of events: transformers alone keeps that of the trial before."""
    side.watcher.arguments[:] = [
        (event, [name for name in names if name != "eval_dataloader"]) for event, names in side.watcher.arguments
    ]


@scenario(extra=True)
def search_by_the_evaluation_loss_with_a_seeded_sampler(side: Side) -> Record:
    return searched(side, searching_trainer(side), n_trials=4)


@scenario(extra=True, saves=True)
def search_that_saves_and_loads_the_best_model_of_each_trial(side: Side) -> Record:
    arguments = {**EACH_EPOCH, "load_best_model_at_end": True, "metric_for_best_model": "certainty"}
    trainer = searching_trainer(side, arguments=arguments, compute_metrics=certainty)
    return searched(side, trainer, n_trials=3, direction="maximize")


@scenario(extra=True)
def search_that_evaluates_after_training_alone(side: Side) -> Record:
    return searched(side, searching_trainer(side, arguments={}), n_trials=2)


@scenario(extra=True)
def search_over_batch_sizes_schedules_and_lengths(side: Side) -> Record:
    def space(trial: Any) -> dict[str, Any]:
        return {
            "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [2, 3, 6]),
            "lr_scheduler_type": trial.suggest_categorical("lr_scheduler_type", ["cosine", "constant"]),
            "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 3),
            "gradient_accumulation_steps": trial.suggest_int("gradient_accumulation_steps", 1, 2),
            "warmup_steps": trial.suggest_int("warmup_steps", 0, 3),
            "max_grad_norm": trial.suggest_float("max_grad_norm", 0.1, 1.0, step=0.1),
        }

    return searched(side, searching_trainer(side), hp_space=space, n_trials=4)


@scenario(extra=True)
def search_with_the_default_space_and_objective(side: Side) -> Record:
    trainer = searching_trainer(side, compute_metrics=certainty)
    return searched(side, trainer, hp_space=None, n_trials=4, direction="maximize")


def make_with_drawn_width(trial: Any) -> nn.Module:
    return NoisyClassifier(8 if trial is None else trial.suggest_int("hidden", 4, 9))


def rate_and_seed(trial: Any) -> dict[str, Any]:
    return {**rate_and_decay(trial), "seed": trial.suggest_int("seed", 1, 40)}


@scenario(extra=True)
def search_over_the_shape_of_the_model_and_the_seed(side: Side) -> Record:
    trainer = searching_trainer(side, model_init=make_with_drawn_width)
    return searched(side, trainer, hp_space=rate_and_seed, n_trials=5)


@scenario(extra=True)
def search_whose_trials_leave_seed_decay_and_patience_to_the_next(side: Side) -> Record:
    def space(trial: Any) -> dict[str, Any]:
        drawn = rate_and_seed(trial)
        return drawn if trial.number % 2 == 0 else {"learning_rate": drawn["learning_rate"]}

    arguments = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
    trainer = searching_trainer(side, model_init=lambda: NoisyClassifier(), arguments=arguments)
    trainer.add_callback(side.names.EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.05))
    return searched(side, trainer, hp_space=space, n_trials=5)


@scenario(extra=True)
def search_whose_space_draws_from_the_generator_itself(side: Side) -> Record:
    import torch

    def space(trial: Any) -> dict[str, Any]:
        # After it comes the dropout of the training.
        torch.rand(3)
        return rate_and_seed(trial)

    trainer = searching_trainer(side, model_init=lambda: NoisyClassifier())
    return searched(side, trainer, hp_space=space, n_trials=4)


@scenario(extra=True)
def search_that_prunes(side: Side) -> Record:
    import optuna

    trainer = searching_trainer(side, arguments={"eval_strategy": "steps", "eval_steps": 2})
    pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=2)
    return searched(side, trainer, n_trials=6, pruner=pruner)


@scenario(extra=True)
def search_with_two_objectives(side: Side) -> Record:
    def loss_and_certainty(metrics: dict[str, float]) -> tuple[float, float]:
        return metrics["eval_loss"], metrics["eval_certainty"]

    trainer = searching_trainer(side, compute_metrics=certainty)
    return searched(side, trainer, n_trials=5, direction=["minimize", "maximize"], compute_objective=loss_and_certainty)


@scenario(extra=True, saves=True)
def search_with_custom_trial_names(side: Side) -> Record:
    trainer = searching_trainer(side, arguments={**EACH_EPOCH, "save_total_limit": 1, "num_train_epochs": 3})
    return searched(side, trainer, n_trials=2, hp_name=lambda trial: f"rate-{trial.params['learning_rate']:.4f}")


@scenario(extra=True)
def search_with_trials_that_fail_and_are_caught(side: Side) -> Record:
    class Failing(side.Trainer):  # type: ignore[name-defined,misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if self.args.weight_decay > 0.15 and self.state.global_step == 1:
                raise ValueError("weight decay is too large")
            return super().compute_loss(*args, **kwargs)

    return searched(side, searching_trainer(side, kind=Failing), n_trials=4, catch=(ValueError,))


@scenario(extra=True)
def search_with_an_objective_that_is_not_a_number(side: Side) -> Record:
    def loss_unless_it_is_high(metrics: dict[str, float]) -> float:
        return metrics["eval_loss"] if metrics["eval_loss"] < 1.4 else float("nan")

    return searched(side, searching_trainer(side), n_trials=3, compute_objective=loss_unless_it_is_high)


@scenario(extra=True)
def search_continued_in_the_same_study(side: Side) -> Record:
    import optuna

    storage = optuna.storages.InMemoryStorage()
    study = optuna.create_study(study_name="search", storage=storage)
    study.enqueue_trial({"learning_rate": 0.02, "weight_decay": 0.1})
    study.add_trial(
        optuna.create_trial(
            params={"learning_rate": 0.05, "weight_decay": 0.2},
            distributions={
                "learning_rate": optuna.distributions.FloatDistribution(1e-4, 1e-1, log=True),
                "weight_decay": optuna.distributions.FloatDistribution(0.0, 0.3),
            },
            value=2.5,
        )
    )
    continued = {"storage": storage, "load_if_exists": True, "gc_after_trial": True}
    return searched(side, searching_trainer(side), n_trials=2, **continued)
