"""Every method that a subclass may override, over the trials of a search: how often it is called, and with what."""

from __future__ import annotations

from typing import Any

from tests.fidelity.cases.overrides import METHODS_OF_BOTH_MODES
from tests.fidelity.cases.search import forget_evaluation_loaders
from tests.fidelity.record import Record
from tests.fidelity.registry import scenario
from tests.fidelity.side import Side
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.overrides import Calls, noting_trainer
from tests.scenarios.pruners import prunes_the_second_trial

# Asked once more when a trial begins, for the folder that it claims, and where the trackers find its checkpoints.
CALLED_MORE_OFTEN = ("_get_output_dir", "hp_name")


@scenario(saves=True, extra=True)
def overriding_every_method_in_a_search_and_calling_the_parents(side: Side) -> Record:
    import optuna

    calls = Calls()
    order: list[Any] = []

    def model_of(trial: Any) -> Any:
        calls.note("model_init", (trial,), {})
        return VectorClassifier()

    def space(trial: Any) -> dict[str, Any]:
        calls.note("hp_space", (trial,), {})
        return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)}

    def objective(metrics: dict[str, float]) -> float:
        calls.note("compute_objective", (metrics,), {})
        order.append(sorted(metrics))
        return metrics["eval_loss"]

    def name(trial: Any) -> str:
        calls.note("hp_name", (trial,), {})
        return f"try-{trial.number}"

    trainer = noting_trainer(side.Trainer, METHODS_OF_BOTH_MODES, calls)(
        model_init=model_of,
        args=side.arguments(
            num_train_epochs=2,
            eval_strategy="steps",
            eval_steps=3,
            save_strategy="steps",
            # The trial that is pruned has no checkpoint, which transformers would leave there.
            save_steps=6,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
        ),
        train_dataset=Rows(vector_rows(12)),
        eval_dataset=Rows(vector_rows(7, seed=1)),
        callbacks=[side.watcher],
    )
    best = trainer.hyperparameter_search(
        hp_space=space,
        compute_objective=objective,
        n_trials=3,
        backend="optuna",
        hp_name=name,
        sampler=optuna.samplers.RandomSampler(seed=1),
        pruner=prunes_the_second_trial(),
    )
    created = calls.group_by_method()
    results = {"calls": {method: ways for method, ways in created.items() if method not in CALLED_MORE_OFTEN}}
    # A further training, from the same arguments on both sides, yields a model to compare.
    trainer.args.learning_rate = best.hyperparameters["learning_rate"]
    output = trainer.train()
    forget_evaluation_loaders(side)
    return side.record(trainer, output, extra={**results, "best": tuple(best), "metrics": order})


@scenario(extra=True)
def a_search_that_reports_metrics_from_an_override(side: Side) -> Record:
    """Overridden hooks of a search: another objective, folder, model and loss, and no pruning."""
    import optuna

    records: list[Any] = []

    class Searching(side.Trainer):  # type: ignore[name-defined,misc]
        def call_model_init(self, trial: Any = None) -> Any:
            model = super().call_model_init(trial=trial)
            # sentence-transformers' Trainer rebuilds its loss around the new model too.
            self.margin = 0.1
            return model

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            loss = loss + self.margin
            return (loss, outputs) if return_outputs else loss

        def _hp_search_setup(self, trial: Any) -> None:
            super()._hp_search_setup(trial)
            if trial is not None:
                self.args.warmup_steps = 2

        def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
            records.append((getattr(trial, "number", None), step, metrics["eval_loss"]))
            super()._report_to_hp_search(trial, step, {**metrics, "eval_loss": -metrics["eval_loss"]})

        def _get_output_dir(self, trial: Any) -> str:
            return f"{super()._get_output_dir(trial)}-of-mine"

    trainer = Searching(
        model_init=lambda: VectorClassifier(),
        args=side.arguments(num_train_epochs=2, eval_strategy="epoch", save_strategy="epoch"),
        train_dataset=Rows(vector_rows(12)),
        eval_dataset=Rows(vector_rows(7, seed=1)),
        callbacks=[side.watcher],
    )
    best = trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-1)},
        n_trials=2,
        sampler=optuna.samplers.RandomSampler(seed=4),
        backend="optuna",
    )
    trainer.args.learning_rate, trainer.args.warmup_steps = best.hyperparameters["learning_rate"], 2
    output = trainer.train()
    forget_evaluation_loaders(side)
    return side.record(trainer, output, extra={"best": tuple(best), "seen": records})
