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

from littrainer import TrainerCallback
from littrainer.arguments.choices import HPSearchBackend
from littrainer.search.parameters import SearchMistake
from littrainer.search.searching import searching
from littrainer.search.trial import default_compute_objective, evaluate_objective, run_trial
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


def test_values_derived_from_arguments_follow_the_trial(tmp_path: Path) -> None:
    smoothing = {"label_smoothing_factor": 0.5}
    trainer = searched_trainer(tmp_path / "searched")
    with in_search(trainer, space=lambda trial: smoothing):
        objective = run_trial(trainer, optuna.trial.FixedTrial({}))
    alone, untouched = searched_trainer(tmp_path / "alone", **smoothing), searched_trainer(tmp_path / "untouched")
    for one in (alone, untouched):
        one.train()
    assert alone.evaluate()["eval_loss"] == objective != untouched.evaluate()["eval_loss"]


def test_columns_and_labels_follow_the_class_of_each_trials_model(tmp_path: Path) -> None:
    def new(trial: Any) -> torch.nn.Module:
        return CountingClassifier() if trial is not None else VectorClassifier()

    changes = {"gradient_accumulation_steps": 2}
    trainer = searched_trainer(tmp_path / "searched", model_init=new, **changes)
    with in_search(trainer):
        objective = run_trial(trainer, fixed(0.01))
    alone = searched_trainer(tmp_path / "alone", model_init=lambda: CountingClassifier(), **changes)
    alone.train()
    assert objective == alone.evaluate()["eval_loss"]


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path)
    trainer.hp_name = lambda trial: 3
    with in_search(trainer), pytest.raises(SearchMistake, match="hp_name returned 3"):
        run_trial(trainer, fixed())


def test_twenty_trials_end_with_the_memory_of_a_single_trial(tmp_path: Path) -> None:
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
            # Another test may have left a weak proxy, whose `isinstance` raises if its object is gone.
            tensors = sum(issubclass(type(held), torch.Tensor) for held in gc.get_objects())
            left.append((len(models), len(optimizers), tensors))
    assert ends[:3] == ["complete", "RuntimeError", "TrialPruned"]
    assert {(alive, steppers) for alive, steppers, _ in left} == {(0, 0)}
    assert len({tensors for _, _, tensors in left}) == 1


def test_a_pruned_trial_stops_at_once_and_trackers_are_notified(tmp_path: Path) -> None:
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
def test_a_search_restores_the_arguments_and_frees_the_model(tmp_path: Path, ends_with: Exception | None) -> None:
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


def test_objectives_become_pythons_numbers_or_are_refused() -> None:
    for returned, expected in ((torch.tensor(0.5), 0.5), ((1, torch.tensor(2)), [1.0, 2.0]), (np.ones(2), [1.0, 1.0])):
        assert evaluate_objective(lambda metrics, returned=returned: returned, {}) == expected
    for returned in (None, "0.5", [0.5, None]):
        with pytest.raises(SearchMistake, match="has to return a number"):
            evaluate_objective(lambda metrics, returned=returned: returned, {})
