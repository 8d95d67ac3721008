"""Searches with Optuna: keywords, failures, pruning, several objectives, and records."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from safetensors.torch import load_file

from littrainer import Trainer, TrainerCallback
from littrainer.search.optuna_backend import describe_distribution
from littrainer.search.parameters import SearchMistake
from littrainer.search.record import load_search_record
from tests.search.trainers import rate_space, searched_trainer


class DrawsInTurn(optuna.samplers.BaseSampler):
    """A sampler that draws these learning rates in order."""

    def __init__(self, *rates: float):
        self.rates = list(rates)

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        return {}

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
        return {}

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        return self.rates.pop(0)


class FailsAtHighRate(Trainer):
    """A Trainer that raises `error` if the learning rate is above 0.05."""

    error: Exception = ValueError("the rate is too high")

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if self.args.learning_rate > 0.05:
            raise self.error
        return super().compute_loss(*args, **kwargs)


def failing_with(error: Exception) -> type[Trainer]:
    return type("FailsOtherwise", (FailsAtHighRate,), {"error": error})


def searched(trainer: Any, *rates: float, **keywords: Any) -> Any:
    return trainer.hyperparameter_search(
        rate_space, **{"n_trials": len(rates) or 1, "sampler": DrawsInTurn(*rates), **keywords}
    )


# ---- Keywords --------------------------------------------------------------------------------------------------------


def test_an_unknown_keyword_suggests_the_nearest_keyword(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"was given sampeler, which neither .*did you mean 'sampler'"):
        searched(searched_trainer(tmp_path), sampeler=None)
    with pytest.raises(TypeError, match=r"was given directions, .*did you mean 'direction'"):
        searched(searched_trainer(tmp_path), directions=["minimize"])


def test_a_pruner_without_evaluations_is_refused(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path)
    with pytest.raises(ValueError, match=r"MedianPruner stops trials by their evaluations .*eval_strategy='no' gives"):
        searched(trainer, 0.01, pruner=optuna.pruners.MedianPruner())
    assert searched(trainer, 0.01, pruner=optuna.pruners.NopPruner()).run_id == "0"


def test_a_storage_that_cannot_be_opened_is_an_error_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be opened \(unable to open database file\).*but not its folder"):
        searched(searched_trainer(tmp_path), 0.01, storage=f"sqlite:///{tmp_path}/absent/study.db")


# ---- The console, and the best model ---------------------------------------------------------------------------------


def test_trials_begin_with_their_values_and_the_search_ends_with_a_table_of_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = [0.0011111111, 0.02, 0.03, 0.001, 0.004, 0.005, 0.06]
    searched(searched_trainer(tmp_path, kind=FailsAtHighRate), *rates)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("Trial ")][:2] == [
        "Trial 0: learning_rate=0.001111",
        "Trial 1: learning_rate=0.02",
    ]
    title = lines.index("Best of 7 trials (6 complete, 1 failed):")
    assert lines[title + 1].split() == ["trial", "objective", "learning_rate"]
    ranked = sorted(load_search_record(tmp_path).trials[:6], key=lambda trial: trial.objectives())
    assert [line.split()[0] for line in lines[title + 2 : title + 7]] == [trial.id for trial in ranked[:5]]
    assert lines[title + 7 :] == [f"All trials: littrainer report {tmp_path}"]


def test_keep_best_trial_keeps_the_model_of_the_best_trial_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = searched_trainer(tmp_path)
    best = searched(trainer, 0.02, 0.1, 0.0001, keep_best_trial=True)
    folder = tmp_path / f"run-{best.run_id}" / "model"
    assert list(tmp_path.rglob("model.safetensors")) == [folder / "model.safetensors"]
    assert f"Kept model: {folder}" in capsys.readouterr().out
    trainer.apply_best(best)
    trainer.train()
    for name, weight in load_file(folder / "model.safetensors").items():
        assert torch.equal(weight, trainer.model.state_dict()[name])


def test_callbacks_are_called_after_each_trial_and_can_end_the_search(tmp_path: Path) -> None:
    trials: list[tuple[int, float]] = []

    def stop_after_two(study: Any, trial: Any) -> None:
        trials.append((trial.number, trial.value))
        if len(trials) == 2:
            study.stop()

    best = searched(searched_trainer(tmp_path), 0.02, 0.01, 0.03, n_trials=None, callbacks=[stop_after_two])
    assert [number for number, _ in trials] == [0, 1]
    assert best.objective == min(value for _, value in trials)
    with pytest.raises(RuntimeError, match="ended before any trial: give it more time"):
        searched(searched_trainer(tmp_path), 0.01, timeout=0)


# ---- Studies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
def test_the_next_call_resumes_an_interrupted_or_killed_search(tmp_path: Path, ending: type[BaseException]) -> None:
    # Optuna does not catch SystemExit, so that the trial remains running as after a kill.
    interrupted_at: list[int] = []

    class InterruptsOnce(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.trial_params == {"learning_rate": 0.02} and not interrupted_at:
                interrupted_at.append(state.global_step)
                raise ending

    trainer = searched_trainer(tmp_path, trainer_kwargs={"callbacks": [InterruptsOnce()]})
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / "studies")))
    keywords = {"n_trials": 3, "storage": storage, "study_name": "s", "load_if_exists": True}
    with pytest.raises(ending):
        searched(trainer, 0.01, 0.02, **keywords)
    if ending is KeyboardInterrupt:
        assert [trial.error for trial in load_search_record(tmp_path).trials] == [None, "it was interrupted"]
    searched(trainer, 0.03, **keywords)
    trials = load_search_record(tmp_path).trials
    assert [trial.state for trial in trials] == ["complete", "failed", "complete", "complete"]
    assert [trial.parameters["learning_rate"] for trial in trials] == [0.01, 0.02, 0.02, 0.03]
    assert trials[1].error == "it was interrupted"
    # A finished search is not resumed.
    searched(trainer, 0.04, 0.05, 0.06, **keywords)
    assert len(optuna.load_study(study_name="s", storage=storage).trials) == 7


def test_a_study_created_for_another_direction_is_refused(tmp_path: Path) -> None:
    storage = optuna.storages.InMemoryStorage()
    optuna.create_study(study_name="rates", storage=storage, direction="maximize")
    with pytest.raises(ValueError, match=r"made for 'maximize': pass direction='maximize', or another study_name"):
        searched(searched_trainer(tmp_path), 0.01, storage=storage, study_name="rates", load_if_exists=True)


# ---- Failures --------------------------------------------------------------------------------------------------------


def test_a_failed_trial_is_recorded_and_the_search_continues(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path, kind=failing_with(torch.OutOfMemoryError("no memory is left")))
    best = searched(trainer, 0.09, 0.01, 0.08, 0.02)
    assert best.run_id in ("1", "3")
    trials = load_search_record(tmp_path).trials
    assert [trial.state for trial in trials] == ["failed", "complete", "failed", "complete"]
    assert trials[0].error == "OutOfMemoryError: no memory is left"
    assert trials[0].objective is None and trials[0].parameters == {"learning_rate": 0.09}


def test_an_objective_that_is_nan_or_too_many_of_them(tmp_path: Path) -> None:
    objectives = iter([math.nan, 2.0])
    best = searched(searched_trainer(tmp_path), 0.01, 0.02, compute_objective=lambda _: next(objectives), catch=())
    assert (best.run_id, best.objective) == ("1", 2.0)
    failed = load_search_record(tmp_path).trials[0]
    assert (failed.state, failed.error) == ("failed", "the objective is nan")
    with pytest.raises(SearchMistake, match=r"compute_objective returned 2 numbers .* give as many directions"):
        searched(searched_trainer(tmp_path), 0.01, compute_objective=lambda _: (1.0, 2.0))


@pytest.mark.parametrize(
    ("error", "keywords"), [(ValueError("too high"), {"catch": ()}), (AttributeError("no such thing"), {})]
)
def test_what_is_not_caught_ends_the_search_with_the_error_as_it_is(
    tmp_path: Path, error: Exception, keywords: dict[str, Any]
) -> None:
    with pytest.raises(type(error)) as raised:
        searched(searched_trainer(tmp_path, kind=failing_with(error)), 0.01, 0.09, 0.02, **keywords)
    assert raised.value is error
    assert [trial.state for trial in load_search_record(tmp_path).trials] == ["complete", "failed"]


class Failing(TrainerCallback):
    def on_step_end(self, *_: Any, **__: Any) -> None:
        raise ValueError("no such thing")


def test_a_callback_error_ends_the_search_unless_catch_contains_its_class(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path, trainer_kwargs={"callbacks": [Failing()]})
    with pytest.raises(ValueError, match="no such thing"):
        searched(trainer, 0.01, 0.02)
    assert len(load_search_record(tmp_path).trials) == 1
    message = r"None of 2 trials .* 2 failed and 0 pruned\. The first failure, in trial 0 with .*: ValueError: no such"
    with pytest.raises(RuntimeError, match=message):
        searched(trainer, 0.01, 0.02, catch=ValueError)


# ---- Results ---------------------------------------------------------------------------------------------------------


def test_the_record_contains_distributions_and_run_folder_of_each_trial(tmp_path: Path) -> None:
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = searched_trainer(tmp_path, **evaluated)
    searched(trainer, 0.01, study_name="rates", hp_name=lambda trial: f"rate of {trial.params['learning_rate']}")
    record = load_search_record(tmp_path)
    (trial,) = record.trials
    assert (record.backend, record.name, record.directions) == ("optuna", "rates", ["minimize"])
    assert trial.distributions == {
        "learning_rate": {"kind": "float", "low": 1e-4, "high": 1e-1, "log": True, "step": None}
    }
    assert trial.folder == str(tmp_path / "rate of 0.01")
    assert trial.seconds is not None and trial.seconds > 0
    assert [value for _, value in trial.intermediate][-1] == trial.objective


def test_distributions_are_described_with_their_ends_scale_and_step() -> None:
    trial = optuna.create_study().ask()
    trial.suggest_float("rate", 1e-5, 1e-1, log=True)
    trial.suggest_float("decay", 0.0, 0.5, step=0.1)
    trial.suggest_int("epochs", 1, 9, step=2)
    trial.suggest_categorical("optim", ["sgd", None, 3])
    descriptions = {name: describe_distribution(drawn) for name, drawn in trial.distributions.items()}
    assert descriptions == {
        "rate": {"kind": "float", "low": 1e-5, "high": 1e-1, "log": True, "step": None},
        "decay": {"kind": "float", "low": 0.0, "high": 0.5, "log": False, "step": 0.1},
        "epochs": {"kind": "int", "low": 1, "high": 9, "log": False, "step": 2},
        "optim": {"kind": "categorical", "choices": ["sgd", None, 3]},
    }
