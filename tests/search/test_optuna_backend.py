"""Searches with Optuna: keywords, failures, pruning, several objectives, and what is recorded."""

from __future__ import annotations

import math
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

from littrainer import BestRun, Trainer, TrainerCallback
from littrainer.search.optuna_backend import caught_errors
from littrainer.search.parameters import SearchMistake
from littrainer.search.record import read_record
from littrainer.search.trial import TRIAL_FAILURES
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS
from tests.search import killed_search
from tests.search.trainers import rate_space, searched_trainer

ROOT = Path(__file__).resolve().parents[2]


class DrawsInTurn(optuna.samplers.BaseSampler):
    """Draws these learning rates, one after the other."""

    def __init__(self, *rates: float):
        self.rates = list(rates)

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        return {}

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
        return {}

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        return self.rates.pop(0)


class FailsAboveATenth(Trainer):
    """Fails where the learning rate is above 0.05, with the error of its class attribute."""

    error: Exception = ValueError("the rate is too high")

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if self.args.learning_rate > 0.05:
            raise self.error
        return super().compute_loss(*args, **kwargs)


def failing_with(error: Exception) -> type[Trainer]:
    return type("FailsOtherwise", (FailsAboveATenth,), {"error": error})


def searched(trainer: Any, *rates: float, **keywords: Any) -> Any:
    return trainer.hyperparameter_search(
        rate_space, **{"n_trials": len(rates) or 1, "sampler": DrawsInTurn(*rates), **keywords}
    )


# ---- Keywords --------------------------------------------------------------------------------------------------------


def test_an_unknown_keyword_suggests_the_nearest_known_one(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"was given sampeler, which neither .*did you mean 'sampler'"):
        searched(searched_trainer(tmp_path), sampeler=None)
    with pytest.raises(TypeError, match=r"was given directions, .*did you mean 'direction'"):
        searched(searched_trainer(tmp_path), directions=["minimize"])


def test_without_catch_a_search_survives_what_hyperparameters_bring_about() -> None:
    assert caught_errors(None) == TRIAL_FAILURES
    assert issubclass(torch.OutOfMemoryError, TRIAL_FAILURES)
    assert caught_errors([KeyError, OSError]) == (KeyError, OSError) and caught_errors(()) == ()
    assert not issubclass(SearchMistake, TRIAL_FAILURES)


def test_callbacks_hear_of_each_trial_and_can_end_the_search(tmp_path: Path) -> None:
    heard: list[tuple[int, float]] = []

    def stop_after_two(study: Any, trial: Any) -> None:
        heard.append((trial.number, trial.value))
        if len(heard) == 2:
            study.stop()

    best = searched(searched_trainer(tmp_path), 0.02, 0.01, 0.03, n_trials=None, callbacks=[stop_after_two])
    assert [number for number, _ in heard] == [0, 1]
    assert best.objective == min(value for _, value in heard)


def test_a_search_without_time_for_a_trial_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended before any trial: give it more time"):
        searched(searched_trainer(tmp_path), 0.01, timeout=0)


# ---- Studies ---------------------------------------------------------------------------------------------------------


def test_a_study_in_a_database_holds_the_trials_and_their_reports(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/studies.db"
    trainer = searched_trainer(tmp_path / "out", eval_strategy="steps", eval_steps=1)
    best = searched(trainer, 0.02, 0.01, storage=url, study_name="rates")
    study = optuna.load_study(study_name="rates", storage=url)
    assert [trial.params for trial in study.trials] == [{"learning_rate": 0.02}, {"learning_rate": 0.01}]
    assert [sorted(trial.intermediate_values) for trial in study.trials] == [[1, 2], [1, 2]]
    assert best == BestRun(str(study.best_trial.number), study.best_value, study.best_params)


def lock(file: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(file)
    connection.execute("BEGIN EXCLUSIVE")
    return connection


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "locked": (lock, "database is locked.*Another process writes to it"),
    "corrupt": (lambda file: file.write_bytes(b"no database" * 400), "not a database.*The file is damaged"),
    "cut off": (lambda file: os.truncate(file, 5000), "malformed.*The file is damaged"),
    "no file": (lambda file: (file.unlink(), file.mkdir()), "unable to open.*See whether its folder"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_storage_that_cannot_be_used_is_named_with_what_to_do(tmp_path: Path, fault: str) -> None:
    file = tmp_path / "studies.db"
    url = f"sqlite:///{file}?timeout=0.1"
    optuna.create_study(study_name="rates", storage=url, direction="minimize")
    make, told = FAULTS[fault]
    made = make(file)
    with pytest.raises(RuntimeError, match=rf"studies\.db.*{told}"):
        searched(searched_trainer(tmp_path / "out"), 0.01, storage=url, study_name="rates", load_if_exists=True)
    del made


def journal(file: Path) -> Any:
    """A journal whose file is damaged after it was opened."""
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(file)))
    file.write_text("garbage\n" * 2)
    return storage


def locked_database(file: Path) -> Any:
    storage = optuna.storages.RDBStorage(f"sqlite:///{file}?timeout=0.1")
    storage.held = lock(file)  # type: ignore[attr-defined]
    return storage


# The storage as an object, or its address -> what is said of it; its file is <folder>/me@host/study.
STORAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "object": (locked_database, "sqlite:///{file}, cannot be used .*Another process"),
    "journal": (journal, "{file}, cannot be used .*Expecting value.*The file is damaged"),
    "address": (
        lambda file: (file.mkdir(), f"sqlite:///{file}")[1],
        "sqlite:///{file}, cannot be used .*unable to open",
    ),
    "server": (lambda file: "sqlite://me:secret@here/study", r"sqlite://me:\*\*\*@here/study, cannot"),
}


@pytest.mark.parametrize("kind", STORAGES)
def test_a_storage_is_named_by_its_address_or_file_without_a_password(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "me@host" / "study"
    file.parent.mkdir()
    make, told = STORAGES[kind]
    with pytest.raises(RuntimeError, match=told.format(file=re.escape(str(file)))) as raised:
        searched(searched_trainer(tmp_path / "out"), 0.01, storage=make(file), study_name="rates")
    assert "secret" not in str(raised.value)


def test_a_storage_that_is_locked_during_the_search_is_named_without_its_password(tmp_path: Path) -> None:
    url = "sqlite:///file:" + f"{tmp_path}/studies.db?timeout=0.1&uri=true&note=//me:secret@here"
    held = []
    with pytest.raises(RuntimeError, match=r"cannot be used .*Another process writes to it") as raised:
        searched(
            searched_trainer(tmp_path / "out"),
            *(0.01, 0.02),
            storage=url,
            study_name="rates",
            callbacks=[lambda study, trial: held.append(lock(tmp_path / "studies.db"))],
        )
    held.pop().close()
    assert "secret" not in str(raised.value)


def test_a_study_of_that_name_is_gone_on_with_only_where_that_is_asked_for(tmp_path: Path) -> None:
    storage = optuna.storages.InMemoryStorage()
    trainer = searched_trainer(tmp_path)
    first = searched(trainer, 0.01, storage=storage, study_name="rates")
    with pytest.raises(optuna.exceptions.DuplicatedStudyError):
        searched(trainer, 0.02, storage=storage, study_name="rates")
    best = searched(trainer, 1e-4, storage=storage, study_name="rates", load_if_exists=True)
    assert best == first
    assert len(optuna.load_study(study_name="rates", storage=storage).trials) == 2


def test_a_search_that_is_interrupted_goes_on_with_the_next_call(tmp_path: Path) -> None:
    pressed: list[int] = []

    class PressesOnce(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.trial_params == {"learning_rate": 0.02} and not pressed:
                pressed.append(state.global_step)
                raise KeyboardInterrupt

    trainer = searched_trainer(tmp_path, given={"callbacks": [PressesOnce()]})
    kept = {"n_trials": 3, "storage": optuna.storages.InMemoryStorage(), "study_name": "s", "load_if_exists": True}
    with pytest.raises(KeyboardInterrupt):
        searched(trainer, 0.01, 0.02, **kept)
    assert [(trial.state, trial.error) for trial in read_record(tmp_path).trials] == [
        ("complete", None),
        ("failed", "it was interrupted"),
    ]
    searched(trainer, 0.03, **kept)
    completed = [trial for trial in read_record(tmp_path).trials if trial.state == "complete"]
    assert [trial.parameters["learning_rate"] for trial in completed] == [0.01, 0.02, 0.03]


def test_a_search_that_is_killed_goes_on_with_what_is_left_of_it(tmp_path: Path) -> None:
    """Killed in its third trial of five; the next call does that trial again, and two more."""
    url = f"sqlite:///{tmp_path}/studies.db"
    command = [sys.executable, "-m", "tests.search.killed_search", str(tmp_path), "2"]
    killed = subprocess.run(command, cwd=ROOT, timeout=LONGEST_WAIT_SECONDS, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = optuna.load_study(study_name="killed", storage=url).trials
    assert [trial.state.name for trial in before] == ["COMPLETE", "COMPLETE", "RUNNING"]
    killed_search.search(tmp_path / "out", url)
    study = optuna.load_study(study_name="killed", storage=url)
    states = [trial.state.name for trial in study.trials]
    assert states == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE", "COMPLETE", "COMPLETE"]
    assert study.trials[3].params == before[2].params
    assert len({tuple(trial.params.values()) for trial in study.trials}) == 5
    assert [trial.error for trial in read_record(tmp_path / "out").trials][2] == "it was interrupted"
    # A search that came to its end is not gone on with.
    killed_search.search(tmp_path / "out", url, n_trials=1)
    assert len(study.get_trials()) == 7


def test_a_study_made_for_another_direction_is_refused(tmp_path: Path) -> None:
    storage = optuna.storages.InMemoryStorage()
    optuna.create_study(study_name="rates", storage=storage, direction="maximize")
    with pytest.raises(ValueError, match=r"made for 'maximize': pass direction='maximize', or another study_name"):
        searched(searched_trainer(tmp_path), 0.01, storage=storage, study_name="rates", load_if_exists=True)


# ---- Failures --------------------------------------------------------------------------------------------------------


def test_a_trial_that_fails_is_recorded_and_the_search_goes_on(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path, kind=failing_with(torch.OutOfMemoryError("no memory is left")))
    best = searched(trainer, 0.09, 0.01, 0.08, 0.02)
    assert best.run_id in ("1", "3")
    trials = read_record(tmp_path).trials
    assert [trial.state for trial in trials] == ["failed", "complete", "failed", "complete"]
    assert trials[0].error == "OutOfMemoryError: no memory is left"
    assert trials[0].objective is None and trials[0].parameters == {"learning_rate": 0.09}


def test_an_objective_that_is_nan_or_too_many_of_them(tmp_path: Path) -> None:
    objectives = iter([math.nan, 2.0])
    best = searched(searched_trainer(tmp_path), 0.01, 0.02, compute_objective=lambda _: next(objectives), catch=())
    assert (best.run_id, best.objective) == ("1", 2.0)
    failed = read_record(tmp_path).trials[0]
    assert (failed.state, failed.error) == ("failed", "the objective is nan")
    with pytest.raises(SearchMistake, match=r"compute_objective returned 2 numbers .* give as many directions"):
        searched(searched_trainer(tmp_path), 0.01, compute_objective=lambda _: (1.0, 2.0))


def test_catching_nothing_ends_the_search_with_the_first_failure_as_it_is(tmp_path: Path) -> None:
    error = ValueError("the rate is too high")
    with pytest.raises(ValueError) as raised:
        searched(searched_trainer(tmp_path, kind=failing_with(error)), 0.01, 0.09, 0.02, catch=())
    assert raised.value is error
    assert [trial.state for trial in read_record(tmp_path).trials] == ["complete", "failed"]


def test_an_error_of_the_script_ends_the_search_at_once(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="no such thing"):
        searched(searched_trainer(tmp_path, kind=failing_with(AttributeError("no such thing"))), 0.09, 0.01)
    assert [trial.state for trial in read_record(tmp_path).trials] == ["failed"]


class Failing(TrainerCallback):
    def on_step_end(self, *_: Any, **__: Any) -> None:
        raise ValueError("no such thing")


def test_an_error_of_a_callback_ends_the_search_unless_its_class_is_given_to_catch(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path, given={"callbacks": [Failing()]})
    with pytest.raises(ValueError, match="no such thing"):
        searched(trainer, 0.01, 0.02)
    assert len(read_record(tmp_path).trials) == 1
    with pytest.raises(RuntimeError, match="None of 2 trials was completed"):
        searched(trainer, 0.01, 0.02, catch=ValueError)


def test_a_mistake_in_the_space_ends_the_search_whatever_is_caught(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path)
    with pytest.raises(SearchMistake, match="hp_space failed: ZeroDivisionError"):
        trainer.hyperparameter_search(
            lambda trial: {"learning_rate": trial.number / 0},
            n_trials=3,
            catch=(Exception,),
        )
    assert len(read_record(tmp_path).trials) == 1


def test_where_no_trial_is_completed_the_error_names_the_first_failure(tmp_path: Path) -> None:
    message = (
        r"None of 2 trials .* 2 failed and 0 pruned\. The first failure, in trial 0 with .*0\.09.*: ValueError: the"
    )
    with pytest.raises(RuntimeError, match=message):
        searched(searched_trainer(tmp_path, kind=FailsAboveATenth), 0.09, 0.08)


# ---- Pruning ---------------------------------------------------------------------------------------------------------


class PrunesHighRates(optuna.pruners.BasePruner):
    def prune(self, study: Any, trial: Any) -> bool:
        return trial.params["learning_rate"] > 0.05


SAVES_EACH_STEP: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "max_steps": 3,
}


def test_where_all_trials_are_pruned_the_error_says_so(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path, eval_strategy="steps", eval_steps=1)
    with pytest.raises(RuntimeError, match="None of 1 trials was completed: 0 failed and 1 pruned"):
        searched(trainer, 0.09, pruner=PrunesHighRates())


# ---- Results ---------------------------------------------------------------------------------------------------------


def test_with_two_objectives_all_runs_that_none_surpasses_are_returned(tmp_path: Path) -> None:
    values = iter([(1.0, 1.0), (2.0, 3.0), (2.0, 2.0), (0.5, 0.0)])
    found = searched(
        searched_trainer(tmp_path),
        *(0.01, 0.02, 0.03, 0.04),
        direction=("minimize", "maximize"),
        compute_objective=lambda metrics: next(values),
    )
    assert [(run.run_id, run.objective) for run in found] == [("0", [1.0, 1.0]), ("1", [2.0, 3.0]), ("3", [0.5, 0.0])]
    assert read_record(tmp_path).directions == ["minimize", "maximize"]


def test_the_record_holds_what_each_trial_drew_from_and_left(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path, **SAVES_EACH_STEP)
    searched(trainer, 0.01, study_name="rates", hp_name=lambda trial: f"rate of {trial.params['learning_rate']}")
    record = read_record(tmp_path)
    (trial,) = record.trials
    assert (record.backend, record.name, record.directions) == ("optuna", "rates", ["minimize"])
    assert trial.distributions == {
        "learning_rate": {"kind": "float", "low": 1e-4, "high": 1e-1, "log": True, "step": None}
    }
    assert trial.folder == str(tmp_path / "rate of 0.01")
    assert trial.seconds is not None and trial.seconds > 0
    assert [value for _, value in trial.intermediate][-1] == trial.objective
