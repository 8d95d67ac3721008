"""One of two processes that search together: `python -m tests.distributed.searching_process FOLDER`.

Each writes what it found to `FOLDER/RANK.pickle`.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import torch

from littrainer import Trainer, TrainerCallback
from littrainer.distributed.failure_report import LostProcess
from littrainer.search import distributed_search, wandb_sweep
from littrainer.search.record import read_record
from tests.scenarios.once_per_process import leave_out_of_collections
from tests.search.trainers import searched_trainer

RANK = int(os.environ["RANK"])
RATES = [0.01, 0.02, 0.03, 0.04]


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
    """What a search over `RATES` returns, or raises, and what became of its trials in the first process."""
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
        found["notes"] = getattr(error, "__notes__", [])
    return {**found, "trials": study.trials, "begun": trainer.notes.begun, "ended": trainer.notes.ended}


class PrunesSecond(optuna.pruners.BasePruner):
    """Prunes the second trial at its second evaluation."""

    def prune(self, study: Any, trial: Any) -> bool:
        return trial.number == 1 and trial.last_step == 2


def pruning(folder: Path) -> Any:
    trainer = trainer_for(folder / "pruning", save_strategy="steps", save_steps=1)
    found = searched(trainer, pruner=PrunesSecond())
    folders = sorted(path.name for path in (folder / "pruning").glob("run-*"))
    return {**found, "folders": folders}


class FailsInOne(Trainer):
    """Fails in the forward pass of the second process, in the second trial."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if RANK == 1 and self._trial.number == 1:
            raise ValueError("sample 17 does not fit into memory")
        return super().compute_loss(*args, **kwargs)


def failing_in_one(folder: Path) -> Any:
    """The second trial fails in a forward pass, the third one in the metric function."""

    def metrics(prediction: Any) -> dict[str, float]:
        if RANK == 1 and trainer._trial.number == 2:
            raise ValueError("a label is missing")
        return {}

    trainer = trainer_for(folder / "failing", FailsInOne, {"compute_metrics": metrics})
    return searched(trainer, n_trials=4)


def failing_at_the_first(folder: Path) -> Any:
    """No failure is caught."""
    return searched(trainer_for(folder / "strict", FailsInOne), catch=())


def an_objective_of_each_process(folder: Path) -> Any:
    """Such as one by the time taken; it is nan in the last trial."""
    values = iter([0.5, 0.4, float("nan")])

    def objective(metrics: dict[str, float]) -> float:
        return RANK + next(values)

    trainer = trainer_for(folder / "objective", eval_strategy="no")
    return {**searched(trainer, compute_objective=objective), "objective": trainer.objective}


def jobs(folder: Path) -> Any:
    return searched(trainer_for(folder / "jobs"), n_jobs=2)["error"]


def sweep(folder: Path) -> Any:
    """A sweep whose agent runs in the first process; the second one has no run."""
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
    trainer = trainer_for(folder / "sweep", save_strategy="steps", save_steps=3)

    def configuration(trial: Any) -> dict[str, Any]:
        return {"parameters": {"learning_rate": {"values": RATES}}}

    def stopping(trial: Any) -> dict[str, Any]:
        return {**configuration(trial), "early_terminate": {"type": "hyperband"}}

    settings: dict[str, Any] = {"backend": "wandb", "n_trials": 2}
    best = trainer.hyperparameter_search(configuration, **settings)
    try:
        trainer.hyperparameter_search(stopping, **settings)
    except Exception as error:
        refused = str(error)
    record = read_record(folder / "sweep")
    return {
        "best": best,
        "begun": trainer.notes.begun,
        "drawn": len(service.drawn),
        "logged": service.logged,
        "folders": sorted(path.name for path in (folder / "sweep").glob("run-*")),
        "refused": refused,
        "record": [(trial.id, trial.state, len(trial.intermediate)) for trial in record.trials],
    }


class FailsBetween(TrainerCallback):
    """Fails in the second process where the first one goes on to the next step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if RANK == 1 and state.global_step == 1:
            raise ValueError("the disk of this process is full")


def failing_between_steps(folder: Path) -> Any:
    """To come last: after it the processes can no longer agree."""
    distributed_search.SECONDS_UNTIL_ALL_HAVE_FAILED = 1.0
    trainer = trainer_for(folder / "between", eval_strategy="no")
    trainer.add_callback(FailsBetween())
    try:
        trainer.hyperparameter_search(rate, n_trials=3, backend="optuna")
    except LostProcess as error:
        return {"error": str(error), "begun": len(trainer.notes.begun)}
    return "the search went on"


CHECKS = (
    pruning,
    failing_in_one,
    failing_at_the_first,
    an_objective_of_each_process,
    jobs,
    sweep,
    failing_between_steps,
)


def main(folder: Path) -> None:
    leave_out_of_collections()
    found = {check.__name__: check(folder) for check in CHECKS}
    (folder / f"{RANK}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
