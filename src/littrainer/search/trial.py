"""One trial: a training with the trial's parameters, what is reported of it, and the memory that it gives back."""

from __future__ import annotations

import copy
import importlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from littrainer.arguments.choices import HPSearchBackend
from littrainer.callbacks.handler import ENDED_FOR_CALLBACKS, FROM_CALLBACK
from littrainer.callbacks.lightning_callbacks import PACKAGES
from littrainer.distributed.agreement import failing_together, from_first
from littrainer.errors.notes import kind_of
from littrainer.search.parameters import (
    SearchMistake,
    asked,
    differs,
    drawn_in,
    set_parameters,
    settle,
)
from littrainer.training.batch_size_search import empty_device_cache
from littrainer.training.checks import check_arguments

logger = logging.getLogger(__name__)

# What hyperparameters can bring about (memory that runs out, numbers that overflow, values that do not go together).
# Anything else, a misspelled name for one, would fail in each further trial too.
TRIAL_FAILURES: tuple[type[Exception], ...] = (ArithmeticError, MemoryError, RuntimeError, ValueError)


@dataclass(slots=True)
class SearchState:
    """What a hyperparameter search uses, and what it leaves for trainings after it.

    Attributes:
        space, name, compute_objective: the functions that `hyperparameter_search` was given, or the default ones.
        backend: that of the search going on; None outside of one.
        last_backend: that of the last search.
        trial, objective: the current ones, or those of the last training.
        arguments_after: the arguments as the search left them; a training follows what the script changes in them.
        best_trial: what `apply_best` has chosen, for a model_init that takes a trial.
        seeds_of_models: trial -> the seed that its model was made with.
        seed_for_model: for trainings after `apply_best`, seed -> the model's.
    """

    space: Any = None
    name: Any = None
    compute_objective: Any = None
    backend: Any = None
    last_backend: Any = None
    trial: Any = None
    objective: Any = None
    arguments_after: dict[str, Any] | None = None
    best_trial: Any = None
    seeds_of_models: dict[str, int] = field(default_factory=dict)
    seed_for_model: dict[int, int] = field(default_factory=dict)


OF_THE_HANDLER = ("model", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")


def fails_trial_only(error: BaseException) -> bool:
    """Return whether hyperparameters can have brought an error about; one of a callback is taken for the script's."""
    of_callback = any(note.startswith(FROM_CALLBACK) for note in getattr(error, "__notes__", ()))
    return isinstance(error, TRIAL_FAILURES) and not of_callback


def run_trial(
    trainer: Any,
    trial: Any,
    resume_from_checkpoint: str | None = None,
    evaluated_at_end: Callable[[dict[str, float]], None] | None = None,
) -> float | list[float]:
    """Train with the parameters of a trial, and give back all memory however it ends.

    Parameters:
        trial: an Optuna trial, or a dict of parameters.
        resume_from_checkpoint: the folder of a checkpoint to go on from; such a trial has been evaluated before.
        evaluated_at_end: if no evaluation was reported during training, one is made at the end; this is called with
            its metrics while the model is still there.

    Returns:
        the objective of the last evaluation.

    Raises:
        SearchMistake: the script is wrong, so that no further trial makes sense.
        optuna.TrialPruned: the trial was not worth going on with.
        Exception: one of TRIAL_FAILURES, if the trial has failed; or any other error of the script.
    """
    # Of the trial before, whose error may have held something until now.
    release_memory(trainer)
    search = trainer.session.search
    search.objective = None
    lightnings = [one for one in trainer.lightning_callbacks if type(one).__module__.partition(".")[0] in PACKAGES]
    # Lightning's are for one training: a ModelCheckpoint would delete what it has kept of another trial.
    before = {
        one: {name: copy.copy(value) if type(value) in (dict, list) else value for name, value in vars(one).items()}
        for one in lightnings
    }
    try:
        trainer.train(resume_from_checkpoint=resume_from_checkpoint, trial=trial)
        if search.objective is None and resume_from_checkpoint is None:
            metrics = trainer.evaluate()
            search.objective = objective_of(search.compute_objective, metrics)
            if evaluated_at_end is not None:
                evaluated_at_end(metrics)
        return search.objective
    finally:
        for callback, values in before.items():
            vars(callback).clear()
            vars(callback).update(values)
        release_memory(trainer)


def release_memory(trainer: Any) -> None:
    """Let go of a training's model, optimizer, loaders and Lightning objects, and empty the device's cache.

    The Trainer has no model afterwards, until `train()` makes one.
    """
    trainer.session = trainer.session.without_training()
    trainer.model = trainer.model_wrapped = None
    for name in OF_THE_HANDLER:
        setattr(trainer.callback_handler, name, None)
    # It also collects what refers to itself in circles, as Lightning's objects do.
    trainer.accelerator.clear()
    empty_device_cache()


# ---- The arguments of a trial ----------------------------------------------------------------------------------------


def is_of_search(trainer: Any, trial: Any) -> bool:
    """Return whether a training is a trial of a search."""
    return trial is not None and trainer.hp_search_backend is not None


def begin_trial(trainer: Any, trial: Any) -> None:
    """Note the seed that the model of a trial is made with: that of the trial before, as in transformers."""
    search = trainer.session.search
    search.seeds_of_models[str(id_of(search.backend, trial))] = trainer.args.seed


def set_up_trial(trainer: Any, trial: Any) -> None:
    """Set the Trainer's arguments to the parameters of a trial; outside of a search only the trial is noted.

    Raises:
        SearchMistake: the space or a parameter is wrong.
        ValueError: the parameters do not go together.
        NotImplementedError: a parameter's value is not supported.
    """
    search = trainer.session.search
    search.trial = trial
    if trial is None and search.arguments_after is not None:
        # A training after a search follows what the script has set since then.
        left = search.arguments_after
        changed = {name for name, value in vars(trainer.args).items() if differs(value, left.get(name))}
        if changed:
            settle(trainer.args, changed)
            search.arguments_after = dict(vars(trainer.args))
            follow_arguments(trainer, changed)
    if not is_of_search(trainer, trial):
        return
    parameters = drawn_in(trial) if isinstance(trial, Mapping) else asked(trainer.hp_space, trial)
    changed = set_parameters(trainer.args, parameters)
    logger.info("Trial with %s.", ", ".join(f"{name}={value!r}" for name, value in parameters.items()))
    follow_arguments(trainer, changed)


def follow_arguments(trainer: Any, changed: set[str], makes_accelerator: bool = True) -> None:
    """Make again what a Trainer makes of its arguments.

    Parameters:
        changed: names of the arguments that have other values than when it was made.
        makes_accelerator: check the arguments, and make the accelerator too.
    """
    if makes_accelerator:
        check_arguments(trainer.args)
        trainer.create_accelerator_and_postprocess()
    trainer._follow_arguments(changed)


# ---- What is reported of a trial -------------------------------------------------------------------------------------


def default_compute_objective(metrics: dict[str, float]) -> float:
    """Return the objective of a search if nothing else is given: the evaluation loss, or the sum of all other metrics.

    Parameters:
        metrics: what `evaluate()` returned; the epoch and speeds are no metrics.
    """
    endings = ("_runtime", "_per_second")
    measures = {name: value for name, value in metrics.items() if name != "epoch" and not name.endswith(endings)}
    loss = measures.pop("eval_loss", None)
    return sum(measures.values()) if measures else loss  # type: ignore[return-value]


def objective_of(compute_objective: Callable[[dict[str, float]], Any], metrics: dict[str, float]) -> Any:
    """Return the objective of an evaluation: a number, or a list of several; the same in all processes."""
    with failing_together("computing the objective"):
        value = compute_objective(dict(metrics))
        several = isinstance(value, list | tuple) or getattr(value, "shape", ()) not in ((), None)
        found = [_number(one) for one in value] if several else _number(value)
    return from_first(found)


def _number(value: Any) -> float:
    plain = value.item() if getattr(value, "shape", None) == () else value
    if not isinstance(plain, Real):
        raise SearchMistake(
            f"compute_objective returned {plain!r} ({kind_of(plain)}); it has to return a number, or a list of as many "
            "numbers as there are directions."
        )
    return float(plain)


def report(trainer: Any, trial: Any, step: int, metrics: dict[str, float]) -> None:
    """Report an evaluation during training to Optuna, or to a sweep; outside of a search do nothing.

    Parameters:
        step: optimizer steps done.
        metrics: what the evaluation returned.

    Raises:
        SearchMistake: as `objective_of`.
        optuna.TrialPruned: the trial is not worth going on with.
    """
    search = trainer.session.search
    backend = search.backend
    if backend is None or trial is None:
        return
    search.objective = objective_of(search.compute_objective, metrics)
    if isinstance(search.objective, list):
        # Optuna prunes by one objective only.
        return
    if hasattr(trial, "reported"):
        # A sweep's server has the metrics that the tracker logs; the record has this.
        trial.reported.append((step, search.objective))
    if backend != HPSearchBackend.OPTUNA:
        return
    prunes = False
    # A fixed trial belongs to no study: the trial of a search's other processes is one.
    if hasattr(trial, "study"):
        trial.report(search.objective, step)
        prunes = trial.should_prune()
    if from_first(prunes):
        trainer.control = trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
        pruned = importlib.import_module("optuna").TrialPruned(f"Trial {trial.number} was pruned at step {step}.")
        setattr(pruned, ENDED_FOR_CALLBACKS, True)
        raise pruned


def id_of(backend: Any, trial: Any) -> Any:
    """Return what a search's library calls a trial."""
    if backend == HPSearchBackend.RAY:
        return importlib.import_module("ray.tune").get_context().get_trial_id()
    if backend == HPSearchBackend.WANDB and not hasattr(trial, "run_id"):
        return importlib.import_module("wandb").run.id
    return trial.run_id if backend == HPSearchBackend.WANDB else getattr(trial, "number", "")


def output_dir_of(trainer: Any, trial: Any) -> str:
    """Return the folder of a training's checkpoints: of a trial `run-<id>`, or what `hp_name` calls it."""
    if not is_of_search(trainer, trial):
        return trainer.args.output_dir
    hp_name = trainer.hp_name
    name = f"run-{id_of(trainer.hp_search_backend, trial)}" if hp_name is None else hp_name(trial)
    if not isinstance(name, str) or not name:
        raise SearchMistake(f"hp_name returned {name!r} ({kind_of(name)}); it has to return the trial's name as text.")
    return os.path.join(trainer.args.output_dir, name)
