"""One of two processes that search together: `python -m tests.distributed.searching_process FOLDER`.

Both train each trial, and whatever becomes of it becomes of it in both.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import torch

from littrainer import Trainer, TrainerCallback
from littrainer.distributed.collectives import all_gather_object
from littrainer.distributed.failures import LostProcess
from littrainer.search import distributed_search, wandb_sweep
from littrainer.search.parameters import SearchMistake
from littrainer.search.record import load_search_record
from tests.distributed.checks import carry_out
from tests.scenarios.once_per_process import leave_out_of_collections
from tests.search.trainers import searched_trainer

RANK = int(os.environ.get("RANK", "0"))
RATES = [0.01, 0.02, 0.03, 0.04]
LOST_MEMORY = "sample 17 does not fit into memory"


class NotesTrials(TrainerCallback):
    """Keeps the arguments that each training began with, and the step at which it ended."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.ended: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun.append((args.learning_rate, state.trial_params))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ended.append(state.global_step)


def trainer_for(folder: Path, kind: type[Trainer] = Trainer, given: Any = None, **changes: Any) -> Any:
    notes = NotesTrials()
    trainer = searched_trainer(
        folder,
        rows=24,
        kind=kind,
        given={"callbacks": [notes], **(given or {})},
        **{"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, **changes},
    )
    trainer.notes = notes
    return trainer


def rate(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_float("learning_rate", 0.0, 1.0)}


def searched(trainer: Any, hp_space: Callable[[Any], Any] = rate, n_trials: int = 3, **keywords: Any) -> Any:
    """What a search over `RATES` returns or raises in each process, and what became of its trials in the first one."""
    study = SimpleNamespace(trials=[])

    def keep(finished: Any, trial: Any) -> None:
        study.trials.append((trial.number, trial.state.name, trial.user_attrs.get("littrainer:error")))

    callbacks = [keep, *keywords.pop("callbacks", [])]
    sampler = optuna.samplers.GridSampler({"learning_rate": RATES}, seed=0)
    settings = {"sampler": sampler, "backend": "optuna", "callbacks": callbacks, **keywords}
    found: dict[str, Any] = {}
    try:
        found["best"] = trainer.hyperparameter_search(hp_space, n_trials=n_trials, **settings)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    return all_gather_object(
        {**found, "trials": study.trials, "begun": trainer.notes.begun, "ended": trainer.notes.ended}
    )


class PrunesSecond(optuna.pruners.BasePruner):
    """Prunes the second trial at its second evaluation."""

    def prune(self, study: Any, trial: Any) -> bool:
        return trial.number == 1 and trial.last_step == 2


def a_pruned_trial_ends_at_the_same_step_in_both(folder: Path) -> None:
    first, second = searched(trainer_for(folder, save_strategy="steps", save_steps=1), pruner=PrunesSecond())
    assert first["ended"] == second["ended"] == [3, 2, 3]
    assert [state for _, state, _ in first["trials"]] == ["COMPLETE", "PRUNED", "COMPLETE"]


class FailsInOne(Trainer):
    """Fails in the forward pass of the second process, in the second trial."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if RANK == 1 and self._trial.number == 1:
            raise ValueError(LOST_MEMORY)
        return super().compute_loss(*args, **kwargs)


def a_trial_that_fails_in_one_process_has_failed_in_both_which_go_on(folder: Path) -> None:
    # The second trial fails in a forward pass, the third one in the metric function.

    def metrics(prediction: Any) -> dict[str, float]:
        if RANK == 1 and trainer._trial.number == 2:
            raise ValueError("a label is missing")
        return {}

    trainer = trainer_for(folder, FailsInOne, {"compute_metrics": metrics})
    first, second = searched(trainer, n_trials=4)
    third = first["trials"][2][2]
    told = f"FailedElsewhere: Process 0 ends because a forward pass failed in process 1 with ValueError: {LOST_MEMORY}"
    assert [trial[1:] for trial in first["trials"]] == [
        ("COMPLETE", None),
        ("FAIL", told),
        ("FAIL", third),
        ("COMPLETE", None),
    ]
    assert "in process 1 with ValueError: a label is missing" in third
    assert first["best"] == second["best"]
    assert first["begun"] == second["begun"] and len(first["begun"]) == 4
    assert second["trials"] == []


def a_failure_that_nothing_catches_ends_the_search_in_both_and_is_named(folder: Path) -> None:
    first, second = searched(trainer_for(folder, FailsInOne), catch=())
    assert second["error"] == f"ValueError: {LOST_MEMORY}"
    assert f"in process 1 with {second['error']}" in first["error"]
    assert len(first["begun"]) == len(second["begun"]) == 2


def the_objective_is_that_of_the_first_process_in_all_and_nan_fails_in_all(folder: Path) -> None:
    # Such as one by the time taken; it is nan in the last trial.
    values = iter([0.5, 0.4, float("nan")])

    def objective(metrics: dict[str, float]) -> float:
        return RANK + next(values)

    first, second = searched(trainer_for(folder, eval_strategy="no"), compute_objective=objective)
    assert [state for _, state, _ in first["trials"]] == ["COMPLETE", "COMPLETE", "FAIL"]
    assert first["best"] == second["best"] and first["best"].objective == 0.4


def jobs_that_run_trials_in_one_process_are_refused(folder: Path) -> None:
    with pytest.raises(SearchMistake, match="n_jobs=2 runs each trial in one process, and here 2 processes train one"):
        trainer_for(folder).hyperparameter_search(rate, n_trials=3, backend="optuna", n_jobs=2)


def both_processes_train_what_a_sweep_draws_for_the_first_one(folder: Path) -> None:
    # Its agent runs in the first process; the second one has no run.
    service = SimpleNamespace(run=None, drawn=[], logged=[])

    def init() -> Any:
        config = {"learning_rate": RATES[len(service.drawn)]}
        service.drawn.append(config)
        summary = {"eval/loss": 0.0}
        service.run = SimpleNamespace(
            id=f"id{len(service.drawn)}", config=config, summary=summary, log=service.logged.append
        )
        return service.run

    def finish(exit_code: int = 0) -> None:
        service.run = None

    def agent(sweep_id: str, function: Any, count: int, entity: Any, project: Any) -> None:
        for _ in range(count):
            function()
            finish()

    service.init, service.finish, service.agent = init, finish, agent
    service.sweep = lambda configuration, entity, project: "sweep7"
    wandb_sweep._wandb, wandb_sweep.WandbCallback = (lambda: service), TrainerCallback  # type: ignore[misc, assignment]
    trainer = trainer_for(folder, save_strategy="steps", save_steps=3)

    def configuration(trial: Any) -> dict[str, Any]:
        return {"parameters": {"learning_rate": {"values": RATES}}}

    def stopping(trial: Any) -> dict[str, Any]:
        return {**configuration(trial), "early_terminate": {"type": "hyperband"}}

    settings: dict[str, Any] = {"backend": "wandb", "n_trials": 2}
    best = trainer.hyperparameter_search(configuration, **settings)
    # Nor are trials stopped in one process.
    with pytest.raises(Exception, match="early_terminate"):
        trainer.hyperparameter_search(stopping, **settings)
    trials = [(trial.id, trial.state, len(trial.intermediate)) for trial in load_search_record(folder).trials]
    assert all_gather_object(best) == [best] * 2 and best.run_summary == "sweep7"
    assert trainer.notes.begun == [(drawn, {"learning_rate": drawn}) for drawn in RATES[:2]]
    assert len(service.drawn) == (0 if RANK else 2)
    if RANK == 0:
        assert service.logged[1] == {"objective": best.objective}
        assert sorted(path.name for path in folder.glob("run-*")) == ["run-id1", "run-id2"]
        assert trials == [("id1", "complete", 3), ("id2", "complete", 3)]


class FailsBetween(TrainerCallback):
    """Fails in the second process where the first one goes on to the next step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if RANK == 1 and state.global_step == 1:
            raise ValueError("the disk of this process is full")


def a_failure_between_steps_ends_the_search_in_both_and_is_named(folder: Path) -> None:
    """Has to come last: after it the processes can no longer agree."""
    distributed_search.MAX_WAIT_FOR_FAILURES_S = 1.0
    trainer = trainer_for(folder, eval_strategy="no")
    trainer.add_callback(FailsBetween())
    with pytest.raises(LostProcess, match=r"failed(.|\n)*ValueError: the disk of this process is full"):
        trainer.hyperparameter_search(rate, n_trials=3, backend="optuna")
    assert len(trainer.notes.begun) == 1


CHECKS = (
    a_pruned_trial_ends_at_the_same_step_in_both,
    a_trial_that_fails_in_one_process_has_failed_in_both_which_go_on,
    a_failure_that_nothing_catches_ends_the_search_in_both_and_is_named,
    the_objective_is_that_of_the_first_process_in_all_and_nan_fails_in_all,
    jobs_that_run_trials_in_one_process_are_refused,
    both_processes_train_what_a_sweep_draws_for_the_first_one,
    a_failure_between_steps_ends_the_search_in_both_and_is_named,
)


if __name__ == "__main__":
    torch.set_num_threads(1)
    leave_out_of_collections()
    carry_out(CHECKS, Path(sys.argv[1]))
