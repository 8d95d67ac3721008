"""`hyperparameter_search`: what it is given is checked before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest

from littrainer import Trainer, TrainerCallback
from littrainer.arguments.choices import HPSearchBackend
from littrainer.search.searching import checked_direction, checked_number_of_trials
from tests.compat.processes import facts_of
from tests.scenarios.trainers import quiet_trainer
from tests.search.trainers import rate_space, searched_trainer


def search(trainer: Any, **keywords: Any) -> Any:
    return trainer.hyperparameter_search(**{"hp_space": rate_space, "n_trials": 1, "backend": "optuna", **keywords})


def test_a_trainer_without_model_init_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="pass model_init to the Trainer instead of model"):
        search(quiet_trainer(tmp_path))


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"n_trials": 0}, ValueError, "n_trials=0 searches nothing"),
        ({"n_trials": -1}, ValueError, "n_trials=-1 searches nothing"),
        ({"n_trials": 2.5}, TypeError, "n_trials=2.5 is a float"),
        ({"n_trials": True}, TypeError, "n_trials=True is a bool"),
        ({"direction": "minimise"}, ValueError, r"direction='minimise' is .* \(did you mean 'minimize'\?\)"),
        ({"direction": ["minimize", "up"]}, ValueError, "direction='up'"),
        ({"direction": []}, ValueError, "direction is an empty list"),
        ({"direction": None}, TypeError, "direction=None is a NoneType"),
        ({"hp_space": {"learning_rate": 0.1}}, TypeError, "hp_space is a dict, and has to be a function"),
        ({"compute_objective": "eval_loss"}, TypeError, "compute_objective is a str"),
        ({"hp_name": "trial"}, TypeError, "hp_name is a str"),
        ({"backend": "sigopt"}, ValueError, "backend='sigopt' is not known"),
    ],
)
def test_bad_input_is_named_before_anything_is_trained(
    tmp_path: Path, keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    class Never(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("A training has begun.")

    trainer = searched_trainer(tmp_path, given={"callbacks": [Never()]})
    with pytest.raises(error, match=message):
        search(trainer, **keywords)
    assert trainer.hp_space is None


@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
def test_data_that_is_missing_is_named_at_once(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        search(searched_trainer(tmp_path, given={name: None}))


def test_a_subclass_that_evaluates_by_itself_needs_no_eval_dataset(tmp_path: Path) -> None:
    class Own(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            return {"eval_loss": 0.5}

    assert search(searched_trainer(tmp_path, kind=Own, given={"eval_dataset": None})).objective == 0.5


def test_a_search_in_a_search_and_in_a_training_is_refused(tmp_path: Path) -> None:
    caught: list[str] = []

    class Searches(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            with pytest.raises(RuntimeError, match="while this Trainer trains or searches") as error:
                search(trainer)
            caught.append(str(error.value))

    trainer = searched_trainer(tmp_path, given={"callbacks": [Searches()]})
    trainer.train()
    search(trainer)
    assert len(caught) == 2


def test_directions_are_text_a_list_or_optunas_members() -> None:
    assert checked_direction("maximize") == "maximize"
    assert checked_direction(("minimize", "Maximize")) == ["minimize", "maximize"]
    assert checked_direction(optuna.study.StudyDirection.MAXIMIZE) == "maximize"


def test_time_may_take_the_place_of_a_number_of_trials() -> None:
    assert checked_number_of_trials(None, HPSearchBackend.OPTUNA) is None
    assert checked_number_of_trials(-1, HPSearchBackend.RAY) == -1
    with pytest.raises(TypeError, match="n_trials=None"):
        checked_number_of_trials(None, HPSearchBackend.RAY)


def test_the_defaults_are_the_spaces_and_the_objective_of_transformers(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path)
    best = trainer.hyperparameter_search(n_trials=1)
    assert list(best.hyperparameters) == ["learning_rate", "num_train_epochs", "seed", "per_device_train_batch_size"]


def test_a_trainer_loads_no_library_that_drives_searches(tmp_path: Path) -> None:
    code = "import json, sys, littrainer.trainer; print(json.dumps(sorted(sys.modules)))"
    assert {"optuna", "ray", "wandb", "cloudpickle"}.isdisjoint(facts_of(code, tmp_path))
