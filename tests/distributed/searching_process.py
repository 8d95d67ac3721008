"""Hyperparameter searches in two processes: `python -m tests.distributed.searching_process FOLDER`.

Both processes train each trial, and it has the same outcome in both.
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
from littrainer.distributed.failures import PeerLostError
from littrainer.search import distributed_search, wandb_sweep
from littrainer.search.parameters import SearchMistake
from littrainer.search.record import load_search_record
from tests.distributed.checks import run_checks
from tests.scenarios.once_per_process import leave_out_of_collections
from tests.search.trainers import searched_trainer

RANK = int(os.environ.get("RANK", "0"))
RATES = [0.01, 0.02, 0.03, 0.04]
LOST_MEMORY = "sample 17 does not fit into memory"


class RecordsTrials(TrainerCallback):
    """Recorder of the initial arguments and the last step of each training."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.ended: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun.append((args.learning_rate, state.trial_params))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ended.append(state.global_step)


def make_trainer(folder: Path, kind: type[Trainer] = Trainer, trainer_kwargs: Any = None, **changes: Any) -> Any:
    recorder = RecordsTrials()
    trainer = searched_trainer(
        folder,
        rows=24,
        kind=kind,
        trainer_kwargs={"callbacks": [recorder], **(trainer_kwargs or {})},
        **{"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, **changes},
    )
    trainer.recorder = recorder
    return trainer


def rate(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_float("learning_rate", 0.0, 1.0)}


def search(trainer: Any, hp_space: Callable[[Any], Any] = rate, n_trials: int = 3, **keywords: Any) -> Any:
    """Search over `RATES`; return result or error of each process, and the trials' outcomes in the first process."""
    study = SimpleNamespace(trials=[])

    def record(finished: Any, trial: Any) -> None:
        study.trials.append((trial.number, trial.state.name, trial.user_attrs.get("littrainer:error")))

    callbacks = [record, *keywords.pop("callbacks", [])]
    sampler = optuna.samplers.GridSampler({"learning_rate": RATES}, seed=0)
    settings = {"sampler": sampler, "backend": "optuna", "callbacks": callbacks, **keywords}
    outcome: dict[str, Any] = {}
    try:
        outcome["best"] = trainer.hyperparameter_search(hp_space, n_trials=n_trials, **settings)
    except Exception as error:
        outcome["error"] = f"{type(error).__name__}: {error}"
    return all_gather_object(
        {**outcome, "trials": study.trials, "begun": trainer.recorder.begun, "ended": trainer.recorder.ended}
    )


class PrunesSecond(optuna.pruners.BasePruner):
    """Prunes the second trial at its second evaluation."""

    def prune(self, study: Any, trial: Any) -> bool:
        return trial.number == 1 and trial.last_step == 2


def a_pruned_trial_ends_at_the_same_step_in_both(folder: Path) -> None:
    first, second = search(make_trainer(folder, save_strategy="steps", save_steps=1), pruner=PrunesSecond())
    assert first["ended"] == second["ended"] == [3, 2, 3]
    assert [state for _, state, _ in first["trials"]] == ["COMPLETE", "PRUNED", "COMPLETE"]


class FailsInSecondProcess(Trainer):
    """Fails in the forward pass of the second process, in the second trial."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if RANK == 1 and self._trial.number == 1:
            raise ValueError(LOST_MEMORY)
        return super().compute_loss(*args, **kwargs)


def a_failure_in_a_process_fails_the_trial_in_both_and_the_search_continues(folder: Path) -> None:
    # The second trial fails in a forward pass, the third trial in the metric function.

    def metrics(prediction: Any) -> dict[str, float]:
        if RANK == 1 and trainer._trial.number == 2:
            raise ValueError("a label is missing")
        return {}

    trainer = make_trainer(folder, FailsInSecondProcess, {"compute_metrics": metrics})
    first, second = search(trainer, n_trials=4)
    third = first["trials"][2][2]
    error = f"PeerFailedError: Process 0 ends because a forward pass failed in process 1 with ValueError: {LOST_MEMORY}"
    assert [trial[1:] for trial in first["trials"]] == [
        ("COMPLETE", None),
        ("FAIL", error),
        ("FAIL", third),
        ("COMPLETE", None),
    ]
    assert "in process 1 with ValueError: a label is missing" in third
    assert first["best"] == second["best"]
    assert first["begun"] == second["begun"] and len(first["begun"]) == 4
    assert second["trials"] == []


def an_uncaught_failure_ends_the_search_in_both_and_is_named(folder: Path) -> None:
    first, second = search(make_trainer(folder, FailsInSecondProcess), catch=())
    assert second["error"] == f"ValueError: {LOST_MEMORY}"
    assert f"in process 1 with {second['error']}" in first["error"]
    assert len(first["begun"]) == len(second["begun"]) == 2


def the_first_process_computes_the_objective_and_nan_fails_the_trial(folder: Path) -> None:
    # The objective differs between the processes, as if by time, and is nan in the last trial.
    values = iter([0.5, 0.4, float("nan")])

    def objective(metrics: dict[str, float]) -> float:
        return RANK + next(values)

    first, second = search(make_trainer(folder, eval_strategy="no"), compute_objective=objective)
    assert [state for _, state, _ in first["trials"]] == ["COMPLETE", "COMPLETE", "FAIL"]
    assert first["best"] == second["best"] and first["best"].objective == 0.4


def parallel_trials_are_refused(folder: Path) -> None:
    with pytest.raises(SearchMistake, match="n_jobs=2 runs each trial in one process, and here 2 processes train one"):
        make_trainer(folder).hyperparameter_search(rate, n_trials=3, backend="optuna", n_jobs=2)


def both_processes_train_the_trials_of_a_sweep_in_the_first(folder: Path) -> None:
    # The agent runs in the first process only.
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
    trainer = make_trainer(folder, save_strategy="steps", save_steps=3)

    def configuration(trial: Any) -> dict[str, Any]:
        return {"parameters": {"learning_rate": {"values": RATES}}}

    def stopping(trial: Any) -> dict[str, Any]:
        return {**configuration(trial), "early_terminate": {"type": "hyperband"}}

    settings: dict[str, Any] = {"backend": "wandb", "n_trials": 2}
    best = trainer.hyperparameter_search(configuration, **settings)
    # Stopping trials in a single process is not supported.
    with pytest.raises(Exception, match="early_terminate"):
        trainer.hyperparameter_search(stopping, **settings)
    trials = [(trial.id, trial.state, len(trial.intermediate)) for trial in load_search_record(folder).trials]
    assert all_gather_object(best) == [best] * 2 and best.run_summary == "sweep7"
    assert trainer.recorder.begun == [(drawn, {"learning_rate": drawn}) for drawn in RATES[:2]]
    assert len(service.drawn) == (0 if RANK else 2)
    if RANK == 0:
        assert service.logged[1] == {"objective": best.objective}
        assert sorted(path.name for path in folder.glob("run-*")) == ["run-id1", "run-id2"]
        assert trials == [("id1", "complete", 3), ("id2", "complete", 3)]


class FailsBetweenSteps(TrainerCallback):
    """Fails in the second process after the first step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if RANK == 1 and state.global_step == 1:
            raise ValueError("the disk of this process is full")


def a_failure_between_steps_ends_the_search_in_both_and_is_named(folder: Path) -> None:
    """Break the connection of the processes; this check must be the last."""
    distributed_search.MAX_WAIT_FOR_FAILURES_S = 1.0
    trainer = make_trainer(folder, eval_strategy="no")
    trainer.add_callback(FailsBetweenSteps())
    with pytest.raises(PeerLostError, match=r"failed(.|\n)*ValueError: the disk of this process is full"):
        trainer.hyperparameter_search(rate, n_trials=3, backend="optuna")
    assert len(trainer.recorder.begun) == 1


CHECKS = (
    a_pruned_trial_ends_at_the_same_step_in_both,
    a_failure_in_a_process_fails_the_trial_in_both_and_the_search_continues,
    an_uncaught_failure_ends_the_search_in_both_and_is_named,
    the_first_process_computes_the_objective_and_nan_fails_the_trial,
    parallel_trials_are_refused,
    both_processes_train_the_trials_of_a_sweep_in_the_first,
    a_failure_between_steps_ends_the_search_in_both_and_is_named,
)


if __name__ == "__main__":
    torch.set_num_threads(1)
    leave_out_of_collections()
    run_checks(CHECKS, Path(sys.argv[1]))
