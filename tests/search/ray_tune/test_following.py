from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from littrainer.search.record import COMPLETE, FAILED, PRUNED, read_record
from tests.search.trainers import searched_trainer

pytest.importorskip("ray")

from ray import cloudpickle
from ray.exceptions import RayTaskError

from littrainer.search.ray_tune.following import Following


def a_trial(name: str = "a_0", status: str = "RUNNING", **changes: Any) -> Any:
    """What Ray has for a trial."""
    given = {
        "trial_id": name,
        "status": status,
        "config": {"learning_rate": 0.1},
        "last_result": {},
        "metric_analysis": {},
        "stopping_criterion": {},
        "is_saving": False,
        "experiment_dir_name": "experiment",
        "pickled_error_file": None,
    }
    trial = SimpleNamespace(**{**given, **changes})
    trial.is_finished = lambda: trial.status in ("TERMINATED", "ERROR")
    return trial


def a_following(folder: Path, limits: dict[str, float] | None = None) -> Following:
    return Following(searched_trainer(folder), {"learning_rate": 0.1}, "minimize", 2, limits or {})


def reported(following: Following, trial: Any, objective: float, step: int, done: bool = False) -> None:
    """A trial of ten steps reports."""
    result = {"objective": objective, "step": step, "max_steps": 10, "training_iteration": step, "done": done}
    following.on_trial_result(1, [trial], trial, result)
    trial.last_result = result


def test_a_trial_that_a_scheduler_stops_is_pruned(tmp_path: Path) -> None:
    following, trial = a_following(tmp_path), a_trial()
    reported(following, trial, 0.5, step=4, done=True)
    following.on_trial_complete(1, [trial], trial)
    assert following.trials["a_0"].state == PRUNED
    assert read_record(tmp_path).trials[0].intermediate == [(4, 0.5)]


def test_a_trial_that_stops_at_its_last_step_is_complete(tmp_path: Path) -> None:
    following, trial = a_following(tmp_path), a_trial()
    reported(following, trial, 0.5, step=10, done=True)
    following.on_trial_complete(1, [trial], trial)
    assert following.trials["a_0"].state == COMPLETE


def test_a_trial_that_ends_its_training_early_is_complete(tmp_path: Path) -> None:
    following, trial = a_following(tmp_path), a_trial()
    reported(following, trial, 0.5, step=4)
    following.on_trial_complete(1, [trial], trial)
    assert following.trials["a_0"].state == COMPLETE


def test_a_trial_that_is_stopped_while_paused_is_pruned(tmp_path: Path) -> None:
    following, trial = a_following(tmp_path), a_trial()
    reported(following, trial, 0.5, step=4)
    trial.status = "PAUSED"
    following.on_trial_complete(1, [trial], trial)
    assert following.trials["a_0"].state == PRUNED


@pytest.mark.parametrize("by", ["scheduler", "stop"])
def test_a_trial_that_has_had_all_that_the_search_gives_is_complete(tmp_path: Path, by: str) -> None:
    limits = {"training_iteration": 4.0}
    following = a_following(tmp_path, limits if by == "scheduler" else None)
    trial = a_trial(stopping_criterion=limits if by == "stop" else {})
    reported(following, trial, 0.5, step=4, done=True)
    following.on_trial_complete(1, [trial], trial)
    assert following.trials["a_0"].state == COMPLETE


def test_checkpoints_that_lay_in_the_folder_before_are_left_alone(tmp_path: Path) -> None:
    following, trial = a_following(tmp_path), a_trial()
    (tmp_path / "run-a_0" / "checkpoint-3").mkdir(parents=True)
    reported(following, trial, 0.5, step=4, done=True)
    following.on_trial_complete(1, [trial], trial)
    following.close()
    assert (tmp_path / "run-a_0" / "checkpoint-3").is_dir()


def failed_with(folder: Path, error: Exception) -> Any:
    """A trial that Ray has kept this error of."""
    file = folder / "error.pkl"
    file.write_bytes(cloudpickle.dumps(RayTaskError("train", f"Traceback of {error!r}", error)))
    return a_trial(status="ERROR", pickled_error_file=str(file))


def test_a_failure_of_hyperparameters_lets_the_search_go_on(tmp_path: Path) -> None:
    following, trial = a_following(tmp_path), failed_with(tmp_path, ValueError("too small"))
    following.on_trial_error(1, [trial], trial)
    assert following.trials["a_0"].state == FAILED
    assert following.trials["a_0"].error == "ValueError: too small"
    assert following.mistake is None


def test_a_mistake_of_the_script_ends_the_search_with_the_error_itself(tmp_path: Path) -> None:
    following, trial = a_following(tmp_path), failed_with(tmp_path, NameError("no such name"))
    with pytest.raises(NameError):
        following.on_trial_error(1, [trial], trial)
    assert isinstance(following.mistake, NameError)


def test_a_process_that_died_is_a_failure(tmp_path: Path) -> None:
    following, trial = a_following(tmp_path), a_trial(status="ERROR", pickled_error_file=str(tmp_path / "gone"))
    following.on_trial_error(1, [trial], trial)
    assert "left no error" in str(following.trials["a_0"].error)


def test_a_search_of_which_no_trial_is_complete_names_the_first_failure(tmp_path: Path) -> None:
    following, trial = a_following(tmp_path), failed_with(tmp_path, ValueError("too small"))
    following.on_trial_error(1, [trial], trial)
    with pytest.raises(RuntimeError, match=r"None of the 1 trials .* ValueError: too small"):
        following.refuse_without_result([trial])


def test_failed_trials_and_those_without_a_finite_objective_are_not_compared(tmp_path: Path) -> None:
    def with_objective(name: str, value: float, status: str = "TERMINATED") -> Any:
        return a_trial(name, status, metric_analysis={"objective": dict.fromkeys(("last", "min", "max"), value)})

    trials = [
        with_objective("nan", float("nan")),
        with_objective("failed", 0.1, "ERROR"),
        with_objective("fine", 0.2),
        a_trial("silent", "TERMINATED"),
    ]
    assert [trial.trial_id for trial in a_following(tmp_path).completed(trials)] == ["fine"]


def test_trials_that_have_neither_ended_nor_failed_tell_of_ctrl_c(tmp_path: Path) -> None:
    following = a_following(tmp_path)
    assert following.is_interrupted([a_trial("a", "TERMINATED"), a_trial("b", "PENDING")])
    assert not following.is_interrupted([a_trial("a", "TERMINATED"), a_trial("b", "ERROR")])


def test_trials_that_ended_unseen_are_taken_in_when_the_search_is_over(tmp_path: Path) -> None:
    following = a_following(tmp_path)
    ended = a_trial("a", "TERMINATED", last_result={"objective": 0.3, "step": 10, "max_steps": 10})
    stopped = a_trial("b", "TERMINATED", last_result={"objective": 0.4, "step": 2, "max_steps": 10})
    failed = a_trial("c", "ERROR", get_pickled_error=lambda: ValueError("too small"))
    following.take_in([ended, stopped, failed])
    assert [trial.state for trial in read_record(tmp_path).trials] == [COMPLETE, PRUNED, FAILED]
