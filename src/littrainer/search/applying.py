"""`Trainer.apply_best`: the arguments of a search's best trial, set for the trainings to come."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from littrainer.arguments.choices import HPSearchBackend
from littrainer.errors.notes import kind_of
from littrainer.search.results import BestRun
from littrainer.search.trial import follow_arguments
from littrainer.search.trial_parameters import asked, checked_space, drawn_in, set_parameters

if TYPE_CHECKING:
    from littrainer.trainer import Trainer


def apply_best(trainer: Trainer, best: BestRun, hp_space: Callable[[Any], dict[str, Any]] | None) -> None:
    """Set arguments to those of a trial, as `Trainer.apply_best` describes it."""
    if not isinstance(best, BestRun):
        advice = "; it has several objectives, so choose one" if isinstance(best, list) else ""
        raise TypeError(f"apply_best takes a BestRun of hyperparameter_search, and got {kind_of(best)}{advice}.")
    space = hp_space
    if space is None and trainer._last_search_backend == HPSearchBackend.OPTUNA:
        space = trainer.hp_space
    trial: Any = drawn_in(best.hyperparameters)
    parameters = trial
    if space is not None:
        # What it asks the trial for may have other names than the arguments that it makes of them.
        trial = _fixed_trial(best)
        parameters = checked_space(asked(space, trial))
    seed_of_model = trainer._seeds_of_models.get(best.run_id, trainer.args.seed)
    follow_arguments(trainer, set_parameters(trainer, parameters))
    trainer._seed_for_model = {trainer.args.seed: seed_of_model}
    if trainer._arguments_after_search is not None:
        # What the script sets from here on decides over these.
        trainer._arguments_after_search = dict(vars(trainer.args))
    trainer._best_trial = trial


def _fixed_trial(best: BestRun) -> Any:
    optuna: Any = importlib.import_module("optuna")
    number = int(best.run_id) if str(best.run_id).isdigit() else 0
    return optuna.trial.FixedTrial(best.hyperparameters, number)
