"""A trial: its arguments, its objective, its files, and the release of its memory."""

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

from littrainer import TrainerCallback
from littrainer.arguments.choices import HPSearchBackend
from littrainer.search.parameters import SearchMistake
from littrainer.search.searching import searching
from littrainer.search.trial import default_compute_objective, evaluate_objective, run_trial
from tests.scenarios.models import CountingClassifier, VectorClassifier
from tests.search.trainers import new_model, rate_space, searched_trainer


def run_as_search(trainer: Any, *, space: Any = rate_space) -> Any:
    """Return the context of an Optuna search whose trials the test runs."""
    trainer.hp_space = space
    if trainer.compute_objective is None:
        trainer.compute_objective = default_compute_objective
    return searching(trainer, HPSearchBackend.OPTUNA)


def make_fixed_trial(rate: float = 0.01, number: int = 0, **further: Any) -> Any:
    """Return a trial with make_fixed_trial parameters, without a study to report to."""
    return optuna.trial.FixedTrial({"learning_rate": rate, **further}, number)


class StudyTrial(SimpleNamespace):
    """A trial of a study that prunes at a step."""

    study: Any = None

    def suggest_float(self, name: str, *args: Any, **kwargs: Any) -> float:
        return 0.01

    def report(self, value: float, step: int) -> None:
        self.reported.append((step, value))

    def should_prune(self) -> bool:
        return self.reported[-1][0] >= self.pruned_at


def make_study_trial(pruned_at: float = float("inf"), number: int = 0) -> StudyTrial:
    return StudyTrial(number=number, params={"learning_rate": 0.01}, reported=[], pruned_at=pruned_at)


def test_values_derived_from_arguments_follow_the_trial(tmp_path: Path) -> None:
    smoothing = {"label_smoothing_factor": 0.5}
    trainer = searched_trainer(tmp_path / "searched")
    with run_as_search(trainer, space=lambda trial: smoothing):
        objective = run_trial(trainer, optuna.trial.FixedTrial({}))
    alone, untouched = searched_trainer(tmp_path / "alone", **smoothing), searched_trainer(tmp_path / "untouched")
    for trainer_alone in (alone, untouched):
        trainer_alone.train()
    assert alone.evaluate()["eval_loss"] == objective != untouched.evaluate()["eval_loss"]


def test_columns_and_labels_follow_the_class_of_each_trials_model(tmp_path: Path) -> None:
    def new(trial: Any) -> torch.nn.Module:
        return CountingClassifier() if trial is not None else VectorClassifier()

    changes = {"gradient_accumulation_steps": 2}
    trainer = searched_trainer(tmp_path / "searched", model_init=new, **changes)
    with run_as_search(trainer):
        objective = run_trial(trainer, make_fixed_trial(0.01))
    alone = searched_trainer(tmp_path / "alone", model_init=lambda: CountingClassifier(), **changes)
    alone.train()
    assert objective == alone.evaluate()["eval_loss"]


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path)
    trainer.hp_name = lambda trial: 3
    with run_as_search(trainer), pytest.raises(SearchMistake, match="hp_name returned 3"):
        run_trial(trainer, make_fixed_trial())


def test_twenty_trials_end_with_the_memory_of_a_single_trial(tmp_path: Path) -> None:
    models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
    optimizers: weakref.WeakSet[Any] = weakref.WeakSet()

    def new() -> torch.nn.Module:
        models.add(model := new_model())
        return model

    class Remembers(TrainerCallback):
        """A callback that refers to the Trainer."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            optimizers.add(kwargs["optimizer"])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if trainer.args.seed % 3 == 1 and state.global_step == 1:
                raise RuntimeError("CUDA out of memory.")

    trainer = searched_trainer(
        tmp_path, model_init=new, trainer_kwargs={"callbacks": [Remembers()]}, eval_strategy="steps", eval_steps=1
    )
    ends, counts = [], []
    # Objects of earlier tests would be counted.
    gc.collect()
    with run_as_search(trainer, space=lambda trial: {"seed": trial.number}):
        for number in range(20):
            # Complete, failed, pruned, in turn.
            try:
                run_trial(trainer, make_study_trial(pruned_at=2 if number % 3 == 2 else float("inf"), number=number))
                ends.append("complete")
            except (RuntimeError, optuna.TrialPruned) as error:
                ends.append(type(error).__name__)
            gc.collect()
            # `isinstance` raises for the weak proxy of a deleted object.
            tensors = sum(issubclass(type(value), torch.Tensor) for value in gc.get_objects())
            counts.append((len(models), len(optimizers), tensors))
    assert ends[:3] == ["complete", "RuntimeError", "TrialPruned"]
    assert {(alive, steppers) for alive, steppers, _ in counts} == {(0, 0)}
    assert len({tensors for _, _, tensors in counts}) == 1


def test_a_pruned_trial_stops_at_once_and_trackers_are_notified(tmp_path: Path) -> None:
    events: list[str] = []

    class EventRecorder(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            events.append(f"ended at {state.global_step}")

        def on_training_failed(self, args: Any, state: Any, error: BaseException) -> None:
            events.append("failed")

    changes = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 1, "max_steps": 6}
    trainer = searched_trainer(tmp_path, trainer_kwargs={"callbacks": [EventRecorder()]}, **changes)
    with run_as_search(trainer), pytest.raises(optuna.TrialPruned, match="Trial 1 was pruned at step 4"):
        run_trial(trainer, make_study_trial(pruned_at=4, number=1))
    assert events == ["ended at 4"]
    # As in transformers its checkpoints remain.
    files = ["checkpoint-1", "checkpoint-2", "checkpoint-3", "littrainer_run.json"]
    assert sorted(os.listdir(tmp_path / "run-1")) == files


@pytest.mark.parametrize("ends_with", [None, KeyError("of the script")])
def test_a_search_restores_the_arguments_and_frees_the_model(tmp_path: Path, ends_with: Exception | None) -> None:
    class Fails(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if ends_with is not None:
                raise ends_with

    trainer = searched_trainer(tmp_path, trainer_kwargs={"callbacks": [Fails()]})
    trainer.compute_objective = default_compute_objective
    before = dict(vars(trainer.args))
    changing = {"learning_rate": 0.05, "label_smoothing_factor": 0.2, "per_device_train_batch_size": 2, "seed": 3}
    with contextlib.suppress(KeyError), searching(trainer, "some backend"):
        run_trial(trainer, changing)
    assert vars(trainer.args) == before
    assert (trainer.label_smoother, trainer.hp_search_backend, trainer.model) == (None, None, None)
    assert trainer._train_batch_size == before["per_device_train_batch_size"]


def test_objectives_become_pythons_numbers_or_are_refused() -> None:
    for returned, expected in ((torch.tensor(0.5), 0.5), ((1, torch.tensor(2)), [1.0, 2.0]), (np.ones(2), [1.0, 1.0])):
        assert evaluate_objective(lambda metrics, returned=returned: returned, {}) == expected
    for returned in (None, "0.5", [0.5, None]):
        with pytest.raises(SearchMistake, match="has to return a number"):
            evaluate_objective(lambda metrics, returned=returned: returned, {})
