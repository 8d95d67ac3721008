"""A Trainer is after a search what it was before it, and so it is at the start of each trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from littrainer import EarlyStoppingCallback, TrainerCallback
from littrainer.search.failures import SearchMistake
from littrainer.search.searching import searching
from littrainer.search.trial import run_trial
from tests.search.trainers import rate_space, searched_trainer

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}


def trials(trainer: Any, *parameters: dict[str, Any]) -> list[Any]:
    """Carry out a search over given parameters, and return the objectives."""
    trainer.compute_objective = lambda metrics: metrics["eval_loss"]
    with searching(trainer, "some backend", "minimize"):
        return [run_trial(trainer, each) for each in parameters]


def facts_about(trainer: Any) -> dict[str, Any]:
    """What a search must not change, as values that can be compared."""
    return {
        "arguments": dict(vars(trainer.args)),
        "weights": {name: value.clone() for name, value in trainer.model.state_dict().items()},
        "objects": [
            id(each)
            for each in (
                trainer.args,
                trainer.model,
                trainer.model_wrapped,
                trainer.state,
                trainer.control,
                trainer.optimizer,
                trainer.lr_scheduler,
                trainer.callback_handler.model,
            )
        ],
        "callbacks": [id(each) for each in trainer.callback_handler.callbacks],
        "state": {**vars(trainer.state), "log_history": list(trainer.state.log_history)},
        "control": dict(vars(trainer.control)),
        "derived": [
            trainer._train_batch_size,
            trainer.label_smoother,
            trainer.hp_search_backend,
            trainer.is_in_train,
            trainer.current_gradient_accumulation_steps,
        ],
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, weights in expected.pop("weights").items():
        assert torch.equal(found["weights"][name], weights)
    del found["weights"]
    assert found == expected


CHANGING = {
    "learning_rate": 0.05,
    "label_smoothing_factor": 0.2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "seed": 3,
}


@pytest.mark.parametrize("trains_before", [False, True])
def test_a_search_leaves_a_trainer_as_it_was(tmp_path: Path, trains_before: bool) -> None:
    trainer = searched_trainer(tmp_path, **EVALUATED)
    if trains_before:
        trainer.train()
    before = facts_about(trainer)
    trials(trainer, CHANGING)
    assert_same(facts_about(trainer), before)


def test_so_does_one_that_ends_with_an_error(tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True
            trainer.callback_handler.callbacks.append(TrainerCallback())
            raise KeyError("of the script")

    trainer = searched_trainer(tmp_path, given={"callbacks": [Fails()]}, **EVALUATED)
    before = facts_about(trainer)
    with pytest.raises(KeyError):
        trials(trainer, CHANGING)
    assert_same(facts_about(trainer), before)


def test_callbacks_that_a_trial_adds_or_removes_are_as_before_in_the_next_one(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Adds(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append([type(each).__name__ for each in [*handler.callbacks, *trainer.lightning_callbacks]])

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            handler.callbacks.append(TrainerCallback())
            handler.pop_callback(Once)
            trainer.lightning_callbacks.append(Callback())

    class Once(TrainerCallback):
        """Goes away after the first training."""

    class OfBackend(TrainerCallback):
        """Added when the search has begun."""

    trainer = searched_trainer(tmp_path, given={"callbacks": [Adds(), Once()]})
    trainer.compute_objective = lambda metrics: metrics["eval_loss"]
    handler = trainer.callback_handler
    before = list(handler.callbacks)
    with searching(trainer, "some backend", "minimize"):
        trainer.add_callback(OfBackend())
        for seed in (3, 4):
            run_trial(trainer, {"seed": seed})
    assert seen[0] == seen[1]
    assert {"Once", "OfBackend"} <= set(seen[1])
    assert (handler.callbacks, trainer.lightning_callbacks) == (before, [])


def test_dicts_and_lists_in_the_arguments_that_a_trial_changes_have_their_entries_again(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path, lr_scheduler_kwargs={"num_cycles": 1}, lr_scheduler_type="cosine")
    given = trainer.args.lr_scheduler_kwargs

    class Changes(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            args.lr_scheduler_kwargs["num_cycles"] += 1

    trainer.add_callback(Changes())
    trials(trainer, {"seed": 3}, {"seed": 4})
    assert trainer.args.lr_scheduler_kwargs is given
    assert given == {"num_cycles": 1}


def test_a_trainer_goes_on_to_evaluate_and_train_after_a_search(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path / "searched", **EVALUATED)
    trials(trainer, CHANGING)
    untouched = searched_trainer(tmp_path / "untouched", **EVALUATED)
    for name in ("evaluate", "train", "evaluate"):
        found = [getattr(each, name)() for each in (trainer, untouched)]
        assert found[0][1 if name == "train" else "eval_loss"] == found[1][1 if name == "train" else "eval_loss"]


def test_patience_counts_anew_in_each_trial_which_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stopping = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=9.0)
    trainer = searched_trainer(tmp_path, max_steps=5, given={"callbacks": [stopping]}, **EVALUATED)
    steps: list[int] = []

    class Notes(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append(state.global_step)

    trainer.add_callback(Notes())
    trials(trainer, {"seed": 3}, {"seed": 3})
    # The first evaluation counts as improved, the two after it do not.
    assert steps == [3, 3]
    assert stopping.early_stopping_patience_counter == 0
    assert "Each trial begins with EarlyStoppingCallback's state as the search did" in caplog.text


def test_lightning_callbacks_begin_anew_in_each_trial_and_are_as_before_after_the_search(tmp_path: Path) -> None:
    stopping = EarlyStopping(monitor="eval_loss", patience=2, min_delta=9.0)
    saving = ModelCheckpoint(dirpath=tmp_path / "best", monitor="eval_loss")
    trainer = searched_trainer(tmp_path, max_steps=5, given={"callbacks": [stopping, saving]}, **EVALUATED)
    steps: list[int] = []

    class Notes(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append(state.global_step)

    trainer.add_callback(Notes())
    trials(trainer, {"seed": 3}, {"seed": 3})
    assert steps == [3, 3]
    assert (stopping.wait_count, stopping.stopped_epoch) == (0, 0)
    assert (saving.best_model_path, saving.best_k_models) == ("", {})


class Counts(Callback):
    """Keeps one number in checkpoints, and one over all trials."""

    def __init__(self) -> None:
        self.steps = self.steps_of_all = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps += 1
        self.steps_of_all += 1


def test_of_a_scripts_own_lightning_callback_what_it_keeps_in_checkpoints_begins_anew(tmp_path: Path) -> None:
    counts = Counts()
    trainer = searched_trainer(tmp_path, given={"callbacks": [counts]})
    trials(trainer, {"seed": 3}, {"seed": 4})
    assert (counts.steps, counts.steps_of_all) == (0, 4)


def test_what_a_search_goes_by_stays_known_after_it_and_its_backend_does_not(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path)

    def objective(metrics: dict[str, float]) -> float:
        return metrics["eval_loss"]

    trainer.hyperparameter_search(rate_space, objective, n_trials=1, backend="optuna", hp_name=lambda trial: "one")
    assert (trainer.hp_space, trainer.compute_objective) == (rate_space, objective)
    assert trainer.hp_name(None) == "one"
    assert trainer.hp_search_backend is None
    with pytest.raises(SearchMistake, match="empty"):
        trainer.hyperparameter_search(lambda trial: {}, n_trials=1, backend="optuna")
    assert trainer.hp_search_backend is None
