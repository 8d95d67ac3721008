"""One trial: what it trains with, which objective it has, what it leaves behind, and that it gives its memory back."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
import torch

from littrainer import Trainer, TrainerCallback
from littrainer.arguments.choices import HPSearchBackend
from littrainer.search.parameters import SearchMistake
from littrainer.search.searching import searching
from littrainer.search.trial import default_compute_objective, objective_of, run_trial
from tests.scenarios.models import CountingClassifier, VectorClassifier
from tests.search.trainers import new_model, rate_space, searched_trainer


def in_search(trainer: Any, *, space: Any = rate_space) -> Any:
    """A search by Optuna's rules, whose trials the test makes itself."""
    trainer.hp_space = space
    if trainer.compute_objective is None:
        trainer.compute_objective = default_compute_objective
    return searching(trainer, HPSearchBackend.OPTUNA)


def fixed(rate: float = 0.01, number: int = 0, **further: Any) -> Any:
    """A trial whose parameters are given; it belongs to no study, so that nothing is reported."""
    return optuna.trial.FixedTrial({"learning_rate": rate, **further}, number)


class Studied(SimpleNamespace):
    """A trial of a study that prunes at a step."""

    study: Any = None

    def suggest_float(self, name: str, *args: Any, **kwargs: Any) -> float:
        return 0.01

    def report(self, value: float, step: int) -> None:
        self.reported.append((step, value))

    def should_prune(self) -> bool:
        return self.reported[-1][0] >= self.pruned_at


def studied(pruned_at: float = float("inf"), number: int = 0) -> Studied:
    return Studied(number=number, params={"learning_rate": 0.01}, reported=[], pruned_at=pruned_at)


def test_the_objective_is_that_of_the_last_evaluation_during_training(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path, eval_strategy="steps", eval_steps=1)
    trial = studied()
    with in_search(trainer):
        objective = run_trial(trainer, trial)
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert trial.reported == [(1, losses[0]), (2, losses[1])]
    assert objective == losses[1] != losses[0]


def test_without_evaluations_during_training_one_is_made_at_the_end(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path)
    seen: list[Any] = []
    with in_search(trainer):
        objective = run_trial(trainer, fixed(), evaluated_at_end=lambda metrics: seen.append((metrics, trainer.model)))
    assert seen[0][0]["eval_loss"] == objective == trainer.objective
    assert isinstance(seen[0][1], VectorClassifier)


def test_a_trial_without_a_seed_can_be_repeated_from_its_parameters_alone_whatever_was_trained_before(
    tmp_path: Path,
) -> None:
    trainer = searched_trainer(tmp_path)
    with in_search(trainer):
        first = [run_trial(trainer, fixed(rate)) for rate in (0.03, 0.04)]
        assert first[0] != first[1]
        assert [run_trial(trainer, fixed(rate)) for rate in (0.04, 0.03)] == first[::-1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("label_smoothing_factor", 0.5),
        ("per_device_train_batch_size", 2),
        ("gradient_accumulation_steps", 2),
        ("lr_scheduler_type", "constant"),
        ("optim", "sgd"),
        ("max_steps", 1),
    ],
)
def test_what_a_trainer_makes_of_its_arguments_follows_the_trial(tmp_path: Path, name: str, value: Any) -> None:
    def space(trial: Any) -> dict[str, Any]:
        return {name: trial.suggest_categorical(name, [value])}

    trainer = searched_trainer(tmp_path / "searched")
    with in_search(trainer, space=space):
        objective = run_trial(trainer, optuna.trial.FixedTrial({name: value}))
    alone = searched_trainer(tmp_path / "alone", **{name: value})
    alone.train()
    assert objective == alone.evaluate()["eval_loss"]
    untouched = searched_trainer(tmp_path / "untouched")
    untouched.train()
    assert objective != untouched.evaluate()["eval_loss"]


class Embedded(VectorClassifier):
    """Says which module embeds its inputs, one position in each row, so that noise can be added there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Unflatten(1, (1, 6))

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return super().logits(self.embed(x).flatten(1))


def test_noise_in_embeddings_is_that_of_the_trial(tmp_path: Path) -> None:
    def space(trial: Any) -> dict[str, Any]:
        return {"neftune_noise_alpha": trial.suggest_float("alpha", 1, 9)}

    trainer = searched_trainer(tmp_path / "searched", model_init=Embedded)
    with in_search(trainer, space=space):
        objective = run_trial(trainer, optuna.trial.FixedTrial({"alpha": 5.0}))
    assert trainer.neftune_noise_alpha is None
    alone = searched_trainer(tmp_path / "alone", model_init=Embedded, neftune_noise_alpha=5.0)
    alone.train()
    assert objective == alone.evaluate()["eval_loss"]


def test_models_of_another_class_are_fed_by_their_own_rules(tmp_path: Path) -> None:
    def new(trial: Any) -> torch.nn.Module:
        return CountingClassifier() if trial is not None else VectorClassifier()

    changes = {"gradient_accumulation_steps": 2}
    trainer = searched_trainer(tmp_path / "searched", model_init=new, **changes)
    with in_search(trainer):
        objective = run_trial(trainer, fixed(0.01))
    alone = searched_trainer(tmp_path / "alone", model_init=lambda: CountingClassifier(), **changes)
    alone.train()
    assert objective == alone.evaluate()["eval_loss"]


def test_checkpoints_of_a_trial_lie_in_a_folder_of_its_own(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path, save_strategy="steps", save_steps=1)
    with in_search(trainer):
        run_trial(trainer, fixed(number=7))
        assert (trainer.state.is_hyper_param_search, trainer.state.trial_params) == (True, {"learning_rate": 0.01})
        trainer.hp_name = lambda trial: f"rate {trial.params['learning_rate']}"
        run_trial(trainer, fixed(number=8))
        assert trainer.state.trial_name == "rate 0.01"
    assert sorted(os.listdir(tmp_path)) == ["rate 0.01", "run-7"]
    assert sorted(os.listdir(tmp_path / "run-7")) == ["checkpoint-1", "checkpoint-2", "littrainer_run.json"]


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path)
    trainer.hp_name = lambda trial: 3
    with in_search(trainer), pytest.raises(SearchMistake, match="hp_name returned 3"):
        run_trial(trainer, fixed())


def test_a_trial_with_several_objectives_is_not_reported_while_it_trains(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path, eval_strategy="steps", eval_steps=1)
    trainer.compute_objective = lambda metrics: (metrics["eval_loss"], 1)
    trial = studied(pruned_at=0)
    with in_search(trainer):
        objective = run_trial(trainer, trial)
    assert trial.reported == []
    assert objective[1] == 1.0


def test_methods_that_a_subclass_overrides_are_called_as_transformers_calls_them(tmp_path: Path) -> None:
    calls: list[Any] = []

    class Own(Trainer):
        def _hp_search_setup(self, trial: Any) -> None:
            calls.append("setup")
            super()._hp_search_setup(trial)

        def call_model_init(self, trial: Any = None) -> Any:
            calls.append(("model", getattr(trial, "number", None), self.args.learning_rate))
            return super().call_model_init(trial)

        def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
            calls.append(("report", trial.number, step, "eval_loss" in metrics))
            super()._report_to_hp_search(trial, step, metrics)

    trainer = searched_trainer(tmp_path, kind=Own, eval_strategy="steps", eval_steps=2)
    calls.clear()
    with in_search(trainer):
        run_trial(trainer, fixed(0.05, number=3))
    assert calls == [("model", 3, 0.01), "setup", ("report", 3, 2, True)]


def test_a_training_that_is_no_trial_keeps_its_arguments_and_its_folder(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path, save_strategy="steps", save_steps=2)
    trainer.hp_space = rate_space
    trainer.train()
    assert trainer.args.learning_rate == 0.01
    assert (trainer._trial, trainer.state.is_hyper_param_search) == (None, False)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-2", "littrainer_run.json"]


def test_twenty_trials_end_with_the_memory_of_one(tmp_path: Path) -> None:
    models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
    optimizers: weakref.WeakSet[Any] = weakref.WeakSet()

    def new() -> torch.nn.Module:
        models.add(made := new_model())
        return made

    class Remembers(TrainerCallback):
        """Holds on to what it is handed, as callbacks do, and to the Trainer."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            optimizers.add(kwargs["optimizer"])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if trainer.args.seed % 3 == 1 and state.global_step == 1:
                raise RuntimeError("CUDA out of memory.")

    trainer = searched_trainer(
        tmp_path, model_init=new, given={"callbacks": [Remembers()]}, eval_strategy="steps", eval_steps=1
    )
    ends, left = [], []
    # What tests before this one have left may be collected meanwhile, and is counted too.
    gc.collect()
    with in_search(trainer, space=lambda trial: {"seed": trial.number}):
        for number in range(20):
            # Complete, failed, pruned, and so on.
            try:
                run_trial(trainer, studied(pruned_at=2 if number % 3 == 2 else float("inf"), number=number))
                ends.append("complete")
            except (RuntimeError, optuna.TrialPruned) as error:
                ends.append(type(error).__name__)
            gc.collect()
            tensors = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
            left.append((len(models), len(optimizers), tensors))
    assert ends[:3] == ["complete", "RuntimeError", "TrialPruned"]
    assert {(alive, steppers) for alive, steppers, _ in left} == {(0, 0)}
    assert len({tensors for _, _, tensors in left}) == 1


def test_a_pruned_trial_stops_at_once_and_trackers_hear_of_its_end(tmp_path: Path) -> None:
    events: list[str] = []

    class Notes(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            events.append(f"ended at {state.global_step}")

        def on_training_failed(self, args: Any, state: Any, error: BaseException) -> None:
            events.append("failed")

    changes = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 1, "max_steps": 6}
    trainer = searched_trainer(tmp_path, given={"callbacks": [Notes()]}, **changes)
    with in_search(trainer), pytest.raises(optuna.TrialPruned, match="Trial 1 was pruned at step 4"):
        run_trial(trainer, studied(pruned_at=4, number=1))
    assert events == ["ended at 4"]
    # As in transformers its checkpoints stay.
    written = ["checkpoint-1", "checkpoint-2", "checkpoint-3", "littrainer_run.json"]
    assert sorted(os.listdir(tmp_path / "run-1")) == written


@pytest.mark.parametrize("ends_with", [None, KeyError("of the script")])
def test_after_a_search_the_arguments_are_what_they_were_and_the_model_is_gone(
    tmp_path: Path, ends_with: Exception | None
) -> None:
    class Fails(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if ends_with is not None:
                raise ends_with

    trainer = searched_trainer(tmp_path, given={"callbacks": [Fails()]})
    trainer.compute_objective = default_compute_objective
    before = dict(vars(trainer.args))
    changing = {"learning_rate": 0.05, "label_smoothing_factor": 0.2, "per_device_train_batch_size": 2, "seed": 3}
    with contextlib.suppress(KeyError), searching(trainer, "some backend"):
        run_trial(trainer, changing)
    assert vars(trainer.args) == before
    assert (trainer.label_smoother, trainer.hp_search_backend, trainer.model) == (None, None, None)
    assert trainer._train_batch_size == before["per_device_train_batch_size"]


OBJECTIVES = [
    ({"eval_loss": 0.5, "epoch": 2.0, "eval_runtime": 3.0, "eval_samples_per_second": 9.0}, 0.5),
    ({"eval_loss": 0.5, "eval_f1": 0.25, "eval_accuracy": 0.5, "epoch": 1.0}, 0.75),
]


@pytest.mark.parametrize(("metrics", "expected"), OBJECTIVES)
def test_the_default_objective_is_the_loss_or_the_sum_of_the_metrics(metrics: Any, expected: float) -> None:
    assert default_compute_objective(metrics) == expected


@pytest.mark.parametrize(
    ("returned", "expected"),
    [(torch.tensor(0.5), 0.5), (np.float32(0.5), 0.5), ((1, torch.tensor(2)), [1.0, 2.0]), (np.ones(2), [1.0, 1.0])],
)
def test_objectives_become_pythons_numbers(returned: Any, expected: Any) -> None:
    assert objective_of(lambda metrics: returned, {}) == expected


@pytest.mark.parametrize("returned", [None, "0.5", [0.5, None]])
def test_an_objective_that_is_no_number_is_refused(returned: Any) -> None:
    with pytest.raises(SearchMistake, match="has to return a number"):
        objective_of(lambda metrics: returned, {})
