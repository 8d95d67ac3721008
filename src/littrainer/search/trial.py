"""One trial: a training with the trial's parameters, its reports to the backend, and the memory that it frees."""

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
from littrainer.distributed.collectives import LostProcess, broadcast_object, raise_on_all_ranks
from littrainer.loop.checks import check_arguments
from littrainer.loop.out_of_memory import empty_device_cache
from littrainer.runtime.notes import kind_of
from littrainer.search.parameters import (
    SearchMistake,
    call_space,
    get_drawn_parameters,
    has_changed,
    resolve_arguments,
    set_parameters,
)

logger = logging.getLogger(__name__)

# Hyperparameters can cause these errors: memory runs out, numbers overflow, values contradict each other. Any other
# error, such as a misspelled name, would come in each further trial too.
TRIAL_FAILURES: tuple[type[Exception], ...] = (ArithmeticError, MemoryError, RuntimeError, ValueError)


@dataclass(slots=True)
class SearchState:
    """The state of a hyperparameter search, and the part of it that trainings after the search use.

    Attributes:
        space, name, compute_objective: the functions of `hyperparameter_search`, or the default ones.
        backend: that of the running search; None outside of one.
        last_backend: that of the last search.
        trial, objective: the current ones, or those of the last training.
        arguments_after: the arguments at the end of the search; a training follows the script's changes of them.
        best_trial: the choice of `apply_best`, for a model_init that takes a trial.
        seeds_of_models: trial -> the seed that its model was made with.
        seed_for_model: for trainings after `apply_best`, seed -> the model's.
        saves_each_report: in a trial on Ray, whether the scheduler may pause it at any report.
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
    saves_each_report: bool = False


def is_trial_failure(error: BaseException, catch: tuple[type[Exception], ...] = TRIAL_FAILURES) -> bool:
    """Return whether the search continues after an error of a trial.

    Parameters:
        catch: classes of errors after which it does. With the default, an error of a callback is taken for a mistake
            in the script.
    """
    if isinstance(error, SearchMistake | LostProcess) or not isinstance(error, catch):
        return False
    is_of_callback = any(note.startswith(FROM_CALLBACK) for note in getattr(error, "__notes__", ()))
    return catch is not TRIAL_FAILURES or not is_of_callback


def run_trial(
    trainer: Any,
    trial: Any,
    resume_from_checkpoint: str | None = None,
    on_last_evaluation: Callable[[dict[str, float]], None] | None = None,
) -> Any:
    """Train with the parameters of a trial, return its last objective, and free all memory however it ends.

    Parameters:
        trial: an Optuna trial, or a dict of parameters.
        resume_from_checkpoint: the folder of a checkpoint to continue; such a trial has been evaluated before.
        on_last_evaluation: if no evaluation was reported during training, the trial is evaluated at its end; this is
            called with the metrics before the model is freed.

    Raises:
        SearchMistake: the script is wrong, so that no further trial makes sense.
        optuna.TrialPruned: the trial was pruned.
        Exception: one of TRIAL_FAILURES, if the trial has failed; or any other error of the script.
    """
    # The error of the trial before may have held memory until now.
    release_memory(trainer)
    search = trainer.session.search
    search.objective = None
    # Lightning's callbacks are for one training: a ModelCheckpoint would delete the files of another trial.
    states = {
        callback: {name: copy.copy(value) if type(value) in (dict, list) else value for name, value in attributes}
        for callback in trainer.lightning_callbacks
        if type(callback).__module__.partition(".")[0] in PACKAGES and (attributes := vars(callback).items())
    }
    try:
        trainer.train(resume_from_checkpoint=resume_from_checkpoint, trial=trial)
        if search.objective is None and resume_from_checkpoint is None:
            metrics = trainer.evaluate()
            search.objective = evaluate_objective(search.compute_objective, metrics)
            if on_last_evaluation is not None:
                on_last_evaluation(metrics)
        return search.objective
    finally:
        for callback, state in states.items():
            vars(callback).clear()
            vars(callback).update(state)
        release_memory(trainer)


def release_memory(trainer: Any) -> None:
    """Free the model, optimizer, loaders and Lightning objects of a training, and empty the device's cache.

    The Trainer has no model afterwards, until `train()` makes one.
    """
    trainer.session = trainer.session.copy_without_training()
    trainer.model = trainer.model_wrapped = None
    for name in ("model", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"):
        setattr(trainer.callback_handler, name, None)
    # This also collects reference cycles, such as those of Lightning's objects.
    trainer.accelerator.clear()
    empty_device_cache()


# ---- The arguments of a trial ----------------------------------------------------------------------------------------


def is_search_trial(trainer: Any, trial: Any) -> bool:
    """Return whether a training is a trial of a search."""
    return trial is not None and trainer.hp_search_backend is not None


def begin_trial(trainer: Any, trial: Any) -> None:
    """Note the seed that the model of a trial is made with: that of the trial before, as in transformers."""
    search = trainer.session.search
    search.seeds_of_models[str(get_trial_id(search.backend, trial))] = trainer.args.seed


def set_up_trial(trainer: Any, trial: Any) -> None:
    """Set the Trainer's arguments to the parameters of a trial; outside of a search only the trial is noted.

    Raises:
        SearchMistake: the space or a parameter is wrong.
        ValueError: the parameters contradict each other.
        NotImplementedError: a parameter's value is not supported.
    """
    search = trainer.session.search
    search.trial = trial
    if trial is None and search.arguments_after is not None:
        # A training after a search follows the script's changes since then.
        before = search.arguments_after
        changed = {name for name, value in vars(trainer.args).items() if has_changed(value, before.get(name))}
        if changed:
            resolve_arguments(trainer.args, changed)
            search.arguments_after = dict(vars(trainer.args))
            apply_changed_arguments(trainer, changed)
    if not is_search_trial(trainer, trial):
        return
    parameters = get_drawn_parameters(trial) if isinstance(trial, Mapping) else call_space(search.space, trial)
    changed = set_parameters(trainer.args, parameters)
    logger.info("Trial with %s.", ", ".join(f"{name}={value!r}" for name, value in parameters.items()))
    apply_changed_arguments(trainer, changed)


def apply_changed_arguments(trainer: Any, changed: set[str], makes_accelerator: bool = True) -> None:
    """Make the parts of a Trainer again that depend on its arguments.

    Parameters:
        changed: names of the arguments that have other values than when it was made.
        makes_accelerator: check the arguments, and make the accelerator too.
    """
    if makes_accelerator:
        check_arguments(trainer.args)
        trainer.create_accelerator_and_postprocess()
    trainer._apply_changed_arguments(changed)


# ---- The reports of a trial ------------------------------------------------------------------------------------------


def default_compute_objective(metrics: dict[str, float]) -> float:
    """Return the default objective of a search: the evaluation loss, or the sum of all other metrics.

    Parameters:
        metrics: the result of `evaluate()`; the epoch and speeds are no metrics.
    """
    endings = ("_runtime", "_per_second")
    measures = {name: value for name, value in metrics.items() if name != "epoch" and not name.endswith(endings)}
    loss = measures.pop("eval_loss", None)
    return sum(measures.values()) if measures else loss  # type: ignore[return-value]


def evaluate_objective(compute_objective: Callable[[dict[str, float]], Any], metrics: dict[str, float]) -> Any:
    """Return the objective of an evaluation: a number, or a list of several; the same in all processes."""
    with raise_on_all_ranks("computing the objective"):
        value = compute_objective(dict(metrics))
        has_several = isinstance(value, list | tuple) or getattr(value, "shape", ()) not in ((), None)
        objective = [_require_number(entry) for entry in value] if has_several else _require_number(value)
    return broadcast_object(objective)


def _require_number(value: Any) -> float:
    number = value.item() if getattr(value, "shape", None) == () else value
    if not isinstance(number, Real):
        raise SearchMistake(
            f"compute_objective returned {number!r} ({kind_of(number)}); it has to return a number, or a list of as "
            "many numbers as there are directions."
        )
    return float(number)


def report(trainer: Any, trial: Any, step: int, metrics: dict[str, float]) -> None:
    """Report an evaluation during training to Optuna, or to a sweep; outside of a search do nothing.

    Raises:
        SearchMistake: as `evaluate_objective`.
        optuna.TrialPruned: the pruner ends the trial.
    """
    search = trainer.session.search
    if search.backend is None or trial is None:
        return
    search.objective = evaluate_objective(search.compute_objective, metrics)
    if isinstance(search.objective, list):
        # Optuna prunes by one objective only.
        return
    if hasattr(trial, "reported"):
        # A sweep's server has the metrics that the tracker logs; the record has this.
        trial.reported.append((step, search.objective))
    if search.backend != HPSearchBackend.OPTUNA:
        return
    should_prune = False
    # A fixed trial, as the other processes of a search have, belongs to no study.
    if hasattr(trial, "study"):
        trial.report(search.objective, step)
        should_prune = trial.should_prune()
    if broadcast_object(should_prune):
        trainer.control = trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
        pruned = importlib.import_module("optuna").TrialPruned(f"Trial {trial.number} was pruned at step {step}.")
        setattr(pruned, ENDED_FOR_CALLBACKS, True)
        raise pruned


def get_trial_id(backend: Any, trial: Any) -> Any:
    """Return the id of a trial in its backend."""
    if backend == HPSearchBackend.RAY:
        return importlib.import_module("ray.tune").get_context().get_trial_id()
    if backend == HPSearchBackend.WANDB:
        return trial.run_id if hasattr(trial, "run_id") else importlib.import_module("wandb").run.id
    return getattr(trial, "number", "")


def get_trial_folder(trainer: Any, trial: Any) -> str:
    """Return the folder of a training's checkpoints: of a trial `run-<id>`, or the result of `hp_name`."""
    if not is_search_trial(trainer, trial):
        return trainer.args.output_dir
    hp_name = trainer.hp_name
    name = f"run-{get_trial_id(trainer.hp_search_backend, trial)}" if hp_name is None else hp_name(trial)
    if not isinstance(name, str) or not name:
        raise SearchMistake(f"hp_name returned {name!r} ({kind_of(name)}); it has to return the trial's name as text.")
    return os.path.join(trainer.args.output_dir, name)
