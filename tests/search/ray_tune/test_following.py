from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from littrainer.search.record import COMPLETE, FAILED, PRUNED, read_record
from tests.search.trainers import searched_trainer

pytest.importorskip("ray")

from ray import cloudpickle
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from littrainer.search.ray_tune.following import Following
from littrainer.search.ray_tune.trial import EndedByScript


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
        "error_file": None,
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
    following.close(a_trial("a_1"))
    assert (tmp_path / "run-a_0" / "checkpoint-3").is_dir()


def two_stopped(following: Following, folder: Path) -> list[Any]:
    """Two trials that are stopped after each has saved a checkpoint; the second is the better one."""
    trials = [a_trial(name) for name in ("a_0", "a_1")]
    for trial, objective in zip(trials, (0.5, 0.1), strict=True):
        reported(following, trial, objective, step=4, done=True)
        (folder / f"run-{trial.trial_id}" / "checkpoint-4").mkdir(parents=True)
        following.on_trial_complete(1, [trial], trial)
    return trials


def test_the_best_trial_is_complete_and_keeps_its_checkpoints_also_where_it_was_stopped(tmp_path: Path) -> None:
    following = a_following(tmp_path)
    _, best = two_stopped(following, tmp_path)
    following.close(best)
    assert [(trial.id, trial.state) for trial in read_record(tmp_path).trials] == [("a_0", PRUNED), ("a_1", COMPLETE)]
    assert not (tmp_path / "run-a_0").exists()
    assert (tmp_path / "run-a_1" / "checkpoint-4").is_dir()


def test_checkpoints_in_a_folder_that_the_best_trial_shares_are_left_alone(tmp_path: Path) -> None:
    following = a_following(tmp_path)
    following._trainer.hp_name = lambda trial: "run-a_0"
    _, best = two_stopped(following, tmp_path)
    following.close(best)
    assert (tmp_path / "run-a_0" / "checkpoint-4").is_dir()


def test_a_stopped_trial_may_be_the_best_so_far(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_stopped(a_following(tmp_path), tmp_path)
    lines = [line for line in capsys.readouterr().err.splitlines() if "pruned at step 4" in line]
    assert len(lines) == 2 and all("the best so far" in line for line in lines)


def test_trials_that_run_when_the_search_is_interrupted_are_recorded_so(tmp_path: Path) -> None:
    following, ended, running = a_following(tmp_path), a_trial("a"), a_trial("b")
    for trial in (ended, running):
        following.on_trial_start(1, [trial], trial)
        reported(following, trial, 0.5, step=4)
    following.on_trial_complete(1, [ended], ended)
    following.leave_unfinished("it was interrupted")
    found = [(trial.state, trial.error) for trial in read_record(tmp_path).trials]
    assert found == [(COMPLETE, None), (FAILED, "it was interrupted")]


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


@pytest.mark.parametrize("raised", [SystemExit("bye"), SystemExit(3), SystemExit(), KeyboardInterrupt()], ids=repr)
def test_a_trial_in_which_the_script_ends_itself_ends_the_search_as_it_would_without_processes(
    tmp_path: Path, raised: BaseException
) -> None:
    error = EndedByScript(type(raised).__name__, getattr(raised, "code", None))
    following, trial = a_following(tmp_path), failed_with(tmp_path, error)
    with pytest.raises(EndedByScript):
        following.on_trial_error(1, [trial], trial)
    assert type(following.mistake) is type(raised)
    assert getattr(following.mistake, "code", None) == getattr(raised, "code", None)
    assert str(following.trials["a_0"].error).startswith(type(raised).__name__)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ActorDiedError(), "died without an error"),
        (RayActorError(error_msg="died.\n\tclass_name: X\nThe node is running low on memory."), "memory ran out"),
    ],
    ids=["died", "out of memory"],
)
def test_a_process_that_died_is_told_in_a_sentence_with_what_helps(tmp_path: Path, error: Exception, told: str) -> None:
    file = tmp_path / "error.pkl"
    file.write_bytes(cloudpickle.dumps(error))
    following, trial = a_following(tmp_path), a_trial(status="ERROR", pickled_error_file=str(file))
    following.on_trial_error(1, [trial], trial)
    found = str(following.trials["a_0"].error)
    assert told in found and "max_concurrent_trials" in found and "class_name" not in found
    with pytest.raises(RuntimeError, match=told):
        following.refuse_without_result([trial])


def test_memory_that_ran_out_is_told_where_ray_has_kept_the_text_alone(tmp_path: Path) -> None:
    (tmp_path / "error.txt").write_text("Task was killed due to the node running low on memory.")
    following, trial = a_following(tmp_path), a_trial(status="ERROR", error_file=str(tmp_path / "error.txt"))
    following.on_trial_error(1, [trial], trial)
    assert "memory ran out" in str(following.trials["a_0"].error)


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
    assert following.has_unfinished([a_trial("a", "TERMINATED"), a_trial("b", "PENDING")])
    assert not following.has_unfinished([a_trial("a", "TERMINATED"), a_trial("b", "ERROR")])


def test_trials_that_ray_stops_all_at_once_are_pruned_and_one_that_never_began_is_none(tmp_path: Path) -> None:
    following, running, waiting = a_following(tmp_path), a_trial("a"), a_trial("b")
    following.on_trial_start(1, [running], running)
    reported(following, running, 0.5, step=4)
    # As when time_budget_s is over: Ray tells no callback.
    running.status = waiting.status = "TERMINATED"
    following.take_in([running, waiting])
    assert [(trial.id, trial.state) for trial in read_record(tmp_path).trials] == [("a", PRUNED)]


def test_trials_that_ended_unseen_are_taken_in_when_the_search_is_over(tmp_path: Path) -> None:
    following = a_following(tmp_path)
    ended = a_trial("a", "TERMINATED", last_result={"objective": 0.3, "step": 10, "max_steps": 10})
    stopped = a_trial("b", "TERMINATED", last_result={"objective": 0.4, "step": 2, "max_steps": 10})
    failed = a_trial("c", "ERROR", get_pickled_error=lambda: ValueError("too small"))
    following.take_in([ended, stopped, failed])
    assert [trial.state for trial in read_record(tmp_path).trials] == [COMPLETE, PRUNED, FAILED]
