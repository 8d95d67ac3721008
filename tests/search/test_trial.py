"""One trial: what it trains with, which objective it has, what it leaves behind, and that it gives its memory back."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import torch

from littrainer import Trainer, TrainerCallback
from littrainer.arguments.choices import HPSearchBackend
from littrainer.search.failures import ObjectiveIsNan, SearchMistake
from littrainer.search.objective import default_compute_objective
from littrainer.search.searching import searching
from littrainer.search.trial import run_trial
from tests.scenarios.models import CountingClassifier, VectorClassifier
from tests.search.trainers import new_model, rate_space, searched_trainer


def in_search(trainer: Any, *, direction: Any = "minimize", space: Any = rate_space) -> Any:
    """A search by Optuna's rules, whose trials the test makes itself."""
    trainer.hp_space = space
    if trainer.compute_objective is None:
        trainer.compute_objective = default_compute_objective
    return searching(trainer, HPSearchBackend.OPTUNA, direction)


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


def test_trials_whose_learning_rate_has_no_effect_are_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class OwnOptimizer(torch.optim.SGD):
        """Known by its name alone."""

    class MakesItself(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate)
            return self.optimizer

    given = {"optimizer_cls_and_kwargs": (OwnOptimizer, {"lr": 0.1})}
    for kind in (MakesItself, Trainer):
        trainer = searched_trainer(tmp_path, kind=kind, given=given)
        assert "without effect" not in caplog.text
        with in_search(trainer):
            for number in range(2):
                run_trial(trainer, fixed(number=number))
    assert caplog.text.count("Trials set learning_rate without effect") == 1


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
    assert trainer.model_accepts_loss_kwargs is False
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


@pytest.mark.parametrize("is_dict", [False, True])
def test_a_name_that_is_another_each_time_is_asked_for_once_in_each_trial(tmp_path: Path, is_dict: bool) -> None:
    trainer = searched_trainer(tmp_path, save_strategy="steps", save_steps=1)
    names = (f"name {number}" for number in range(9))
    given: list[Any] = []
    trainer.hp_name = lambda trial: given.append(dict(getattr(trial, "params", trial))) or next(names)
    trainer.compute_objective = default_compute_objective
    trainer.hp_space = rate_space
    with searching(trainer, "some backend" if is_dict else HPSearchBackend.OPTUNA, "minimize"):
        for number in range(2):
            trial: Any = {"learning_rate": 0.01} if is_dict else fixed(number=number)
            # As a sweep does, or a callback between two trials.
            folders = {trainer._get_output_dir(trial)} if is_dict else set()
            run_trial(trainer, trial)
            folders.add(trainer._get_output_dir(trial))
            assert folders == {str(tmp_path / f"name {number}")}
            assert trainer.state.trial_name == f"name {number}"
    assert sorted(os.listdir(tmp_path)) == ["name 0", "name 1"]
    # The space was asked before.
    assert given == [{"learning_rate": 0.01}] * 2


def test_what_a_trial_was_called_does_not_travel_to_another_process(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path)
    trainer.hp_name = lambda trial: "one"
    with in_search(trainer) as search:
        # A study's trial holds what cannot be pickled, the lock of its storage for one.
        search.name_of(SimpleNamespace(number=0, lock=threading.Lock()), trainer.hp_name)
        assert pickle.loads(pickle.dumps(search)).directions == ["minimize"]


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path)
    trainer.hp_name = lambda trial: 3
    with in_search(trainer), pytest.raises(SearchMistake, match="hp_name returned 3"):
        run_trial(trainer, fixed())


def test_a_pruned_trial_stops_at_once_and_its_checkpoints_are_deleted(tmp_path: Path) -> None:
    events: list[str] = []

    class Notes(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            events.append(f"ended at {state.global_step}")

        def on_training_failed(self, args: Any, state: Any, error: BaseException) -> None:
            events.append("failed")

    changes = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 1, "max_steps": 6}
    trainer = searched_trainer(tmp_path, given={"callbacks": [Notes()]}, **changes)
    (tmp_path / "run-2" / "checkpoint-9").mkdir(parents=True)
    with in_search(trainer):
        for number in (1, 2):
            with pytest.raises(optuna.TrialPruned, match=f"Trial {number} was pruned at step 4"):
                run_trial(trainer, studied(pruned_at=4, number=number))
    assert events == ["ended at 4", "ended at 4"]
    # What lay there before the trial stays.
    assert os.listdir(tmp_path) == ["run-2"]
    assert os.listdir(tmp_path / "run-2") == ["checkpoint-9"]


def test_a_trial_with_several_objectives_is_not_reported_while_it_trains(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path, eval_strategy="steps", eval_steps=1)
    trainer.compute_objective = lambda metrics: (metrics["eval_loss"], 1)
    trial = studied(pruned_at=0)
    with in_search(trainer, direction=["minimize", "maximize"]):
        objective = run_trial(trainer, trial)
    assert trial.reported == []
    assert objective[1] == 1.0


def test_an_objective_that_is_nan_at_the_end_fails_the_trial_and_before_it_does_not(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path, eval_strategy="steps", eval_steps=1)
    for values, ends in (([float("nan"), 1.0], 1.0), ([1.0, float("nan")], None)):
        left = list(values)
        trainer.compute_objective = lambda metrics, left=left: left.pop(0)
        with in_search(trainer):
            if ends is None:
                with pytest.raises(ObjectiveIsNan):
                    run_trial(trainer, studied())
            else:
                assert run_trial(trainer, studied()) == ends


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


def test_a_model_init_that_makes_no_new_model_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = new_model()
    trainer = searched_trainer(tmp_path, model_init=lambda: model)
    with in_search(trainer):
        for number in range(2):
            run_trial(trainer, fixed(number=number))
    assert caplog.text.count("model_init returned a model that it had returned before") == 1


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
                # What a log or a study keeps of it must not keep the model.
                kept = error  # noqa: F841
            tensors = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
            left.append((len(models), len(optimizers), tensors))
    assert ends[:3] == ["complete", "RuntimeError", "TrialPruned"]
    # The model that the Trainer was made with is kept for the end of the search.
    assert {(alive, steppers) for alive, steppers, _ in left} == {(1, 0)}
    assert len({tensors for _, _, tensors in left}) == 1
