"""What each search library is told of a trial's evaluations, and what it calls the trial."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from littrainer.arguments.choices import HPSearchBackend
from littrainer.callbacks.handler import ENDED_FOR_CALLBACKS
from littrainer.errors.notes import kind_of
from littrainer.search.failures import SearchMistake
from littrainer.search.objective import checked_objective

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

BOTH_DIRECTIONS = ("minimize", "maximize")


def objective_in(trainer: Trainer, metrics: dict[str, float]) -> float | list[float]:
    """The objective of an evaluation, the same in all processes.

    Raises:
        SearchMistake: it is no number, or there are more or fewer than directions.
    """
    directions = BOTH_DIRECTIONS[:1] if trainer._search is None else trainer._search.directions

    def compute() -> float | list[float]:
        assert trainer.compute_objective is not None
        return checked_objective(trainer.compute_objective(dict(metrics)), directions)

    if trainer.args.world_size == 1:
        return compute()
    from littrainer.search.together.search import objective_of_all

    return objective_of_all(compute)


def report(trainer: Trainer, trial: Any, step: int, metrics: dict[str, float]) -> None:
    """Tell the search library of an evaluation during training; outside of a search nothing is told.

    Parameters:
        step: optimizer steps done.
        metrics: what the evaluation returned.

    Raises:
        SearchMistake: as `objective_in`.
        optuna.TrialPruned: the trial is not worth going on with.
    """
    if trainer.hp_search_backend is None or trial is None:
        return
    trainer.objective = objective_in(trainer, metrics)
    tell = REPORTS.get(trainer.hp_search_backend)
    if tell is not None:
        tell(trainer, trial, step, metrics)


def _report_to_optuna(trainer: Trainer, trial: Any, step: int, metrics: dict[str, float]) -> None:
    # Optuna prunes by one objective only; a fixed trial belongs to no study.
    if not hasattr(trial, "study") or isinstance(trainer.objective, list):
        return
    trial.report(trainer.objective, step)
    if trial.should_prune():
        trainer.control = trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
        pruned = importlib.import_module("optuna").TrialPruned(f"Trial {trial.number} was pruned at step {step}.")
        setattr(pruned, ENDED_FOR_CALLBACKS, True)
        raise pruned


def _report_to_ray(trainer: Trainer, trial: Any, step: int, metrics: dict[str, float]) -> None:
    from littrainer.search.ray_tune.trial import report_to_ray

    report_to_ray(trainer, metrics)


def _report_to_sweep(trainer: Trainer, trial: Any, step: int, metrics: dict[str, float]) -> None:
    from littrainer.search.wandb_sweep import report_to_sweep

    report_to_sweep(trainer, trial, step)


def _id_in_sweep(trial: Any) -> str:
    from littrainer.search.wandb_sweep import run_id

    return run_id(trial)


REPORTS: dict[Any, Callable[[Trainer, Any, int, dict[str, float]], None]] = {
    HPSearchBackend.OPTUNA: _report_to_optuna,
    HPSearchBackend.RAY: _report_to_ray,
    HPSearchBackend.WANDB: _report_to_sweep,
}
"""Backend -> how it hears of an evaluation."""

RUN_IDS: dict[Any, Callable[[Any], Any]] = {
    HPSearchBackend.OPTUNA: lambda trial: trial.number,
    HPSearchBackend.RAY: lambda trial: importlib.import_module("ray.tune").get_context().get_trial_id(),
    HPSearchBackend.WANDB: _id_in_sweep,
}
"""Backend -> what it calls a trial."""


def id_of(trainer: Trainer, trial: Any) -> Any:
    """What the search's library calls a trial."""
    backend = trainer.hp_search_backend
    return RUN_IDS[backend](trial) if backend in RUN_IDS else getattr(trial, "number", "")


def output_dir_of(trainer: Trainer, trial: Any) -> str:
    """The folder of a training's checkpoints: for a trial `run-<id>`, or what `hp_name` calls it, in `output_dir`.

    Raises:
        SearchMistake: `hp_name` returns no name of a folder.
    """
    backend = trainer.hp_search_backend
    if backend is None or trial is None:
        return trainer.args.output_dir
    if trainer.hp_name is not None:
        search = trainer._search
        name = name_by(trainer.hp_name, trial) if search is None else search.name_of(trial, trainer.hp_name)
    else:
        name = f"run-{id_of(trainer, trial)}"
    return os.path.join(trainer.args.output_dir, name)


def name_by(hp_name: Callable[[Any], str], trial: Any) -> str:
    """What the script's `hp_name` calls a trial.

    Raises:
        SearchMistake: it returns something else than a text.
    """
    name = hp_name(trial)
    if not isinstance(name, str) or not name:
        raise SearchMistake(f"hp_name returned {name!r} ({kind_of(name)}); it has to return the trial's name as text.")
    return name
