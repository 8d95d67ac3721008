"""The training of a trial with its parameters, its reports to the backend, and the release of its memory."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

from littrainer.arguments.choices import HPSearchBackend
from littrainer.callbacks.handler import ENDED_FOR_CALLBACKS, FROM_CALLBACK
from littrainer.callbacks.lightning_callbacks import PACKAGES
from littrainer.callbacks.progress import has_log_display
from littrainer.distributed.collectives import PeerLostError, broadcast_object, raise_on_all_ranks
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.runtime.notes import add_note, kind_of
from littrainer.search.parameters import (
    SearchMistake,
    call_space,
    get_drawn_parameters,
    has_changed,
    resolve_arguments,
    set_parameters,
)
from littrainer.search.record import MODEL_FOLDER, format_value

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.trainer_context import TrainerContext

# Packages whose callbacks and Trainers read no parameters of trials.
LIBRARIES = ("littrainer", "transformers")
# Hyperparameters can cause these errors; any other error would occur in each further trial too.
TRIAL_FAILURES: tuple[type[Exception], ...] = (ArithmeticError, MemoryError, RuntimeError, ValueError)


@dataclass(slots=True)
class SearchState:
    """The state of a hyperparameter search, and the results that later trainings use.

    Attributes:
        space, name, compute_objective: the functions of `hyperparameter_search`, or their defaults.
        backend: None outside of a search.
        trial, objective: of the current or last training.
        arguments_after: the arguments at the end of the search, to detect later changes by the script.
        best_trial: the choice of `apply_best`, for a model_init that takes a trial.
        seeds_of_models: trial -> the seed of its model.
        seed_for_model: seed of a training after `apply_best` -> the seed of its model.
        saves_each_report: whether Ray's scheduler may pause the trial at any report.
        keeps_best_trial: whether each trial saves its model, of which the best remains.
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
    keeps_best_trial: bool = False


def is_trial_failure(error: BaseException, catch: tuple[type[Exception], ...] = TRIAL_FAILURES) -> bool:
    """Return whether the search continues after an error; by default any error of a callback ends it."""
    if isinstance(error, SearchMistake | PeerLostError) or not isinstance(error, catch):
        return False
    is_of_callback = any(note.startswith(FROM_CALLBACK) for note in getattr(error, "__notes__", ()))
    return catch is not TRIAL_FAILURES or not is_of_callback


def run_trial(
    trainer: TrainerContext,
    trial: Any,
    resume_from_checkpoint: str | None = None,
    on_last_evaluation: Callable[[dict[str, float]], None] | None = None,
) -> Any:
    """Train with the parameters of a trial, return its last objective, and free all memory however it ends.

    Parameters:
        trial: an Optuna trial, or a dict of parameters.
        resume_from_checkpoint: a checkpoint of this trial, which has been evaluated before.
        on_last_evaluation: called with the metrics of an evaluation at the end, if none was reported during training.
    """
    # The previous trial's error may have referred to memory until now.
    trainer.release_training_memory()
    search = trainer.session.search
    search.objective = None
    # Otherwise Lightning's ModelCheckpoint would delete files of other trials.
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
        if search.keeps_best_trial:
            trainer.save_model(os.path.join(get_trial_folder(search, trainer.args.output_dir, trial), MODEL_FOLDER))
        return search.objective
    finally:
        for callback, state in states.items():
            vars(callback).clear()
            vars(callback).update(state)
        trainer.release_training_memory()


# ---- The arguments of a trial ----------------------------------------------------------------------------------------


def is_search_trial(search: SearchState, trial: Any) -> bool:
    return trial is not None and search.backend is not None


def begin_trial(search: SearchState, args: TrainingArguments, trial: Any) -> None:
    """Record the seed of a trial's model: as in transformers, the previous trial's seed."""
    search.seeds_of_models[str(get_trial_id(search.backend, trial))] = args.seed


def set_up_trial(trainer: TrainerContext, trial: Any) -> None:
    """Set the Trainer's arguments to the parameters of a trial; outside of a search only record the trial.

    Raises:
        SearchMistake: the space or a parameter is wrong.
        ValueError, NotImplementedError: the parameters contradict each other or are not supported.
    """
    search = trainer.session.search
    search.trial = trial
    if trial is None and search.arguments_after is not None:
        # Apply the script's changes after the search.
        before = search.arguments_after
        changed = {name for name, value in vars(trainer.args).items() if has_changed(value, before.get(name))}
        if changed:
            resolve_arguments(trainer.args, changed)
            search.arguments_after = dict(vars(trainer.args))
            trainer.apply_changed_arguments(changed)
    if not is_search_trial(search, trial):
        return
    parameters = get_drawn_parameters(trial) if isinstance(trial, Mapping) else call_space(search.space, trial)
    if trainer.args.process_index == 0 and has_log_display(trainer.callback_handler.callbacks):
        shown = ", ".join(f"{name}={format_value(value)}" for name, value in parameters.items())
        print(f"Trial {get_trial_id(search.backend, trial)}: {shown}", flush=True)
    readers = [trainer, *trainer.callback_handler.callbacks]
    is_read = _has_script_classes(readers) or bool(inspect.signature(trainer.model_init).parameters)  # type: ignore[arg-type]
    changed = set_parameters(trainer.args, parameters, refuses_unknown=not is_read)
    trainer.apply_changed_arguments(changed)


def _has_script_classes(readers: Sequence[Any]) -> bool:
    """Return whether a Trainer or callback of the script may read a parameter that is no argument."""
    return any(type(reader).__module__.partition(".")[0] not in LIBRARIES for reader in readers)


# ---- The reports of a trial ------------------------------------------------------------------------------------------


def default_compute_objective(metrics: dict[str, float]) -> float:
    """Return the sum of all metrics except loss, epoch and speeds, or else the evaluation loss."""
    endings = ("_runtime", "_per_second")
    measures = {name: value for name, value in metrics.items() if name != "epoch" and not name.endswith(endings)}
    loss = measures.pop("eval_loss", None)
    return sum(measures.values()) if measures else loss  # type: ignore[return-value]


def evaluate_objective(compute_objective: Callable[[dict[str, float]], Any], metrics: dict[str, float]) -> Any:
    """Return the objective of an evaluation, a number or a list of numbers, from the first process."""
    with raise_on_all_ranks("computing the objective"):
        try:
            value = compute_objective(dict(metrics))
        except Exception as error:
            if not is_a(error, "pruned trial"):
                add_note(error, f"compute_objective received the metrics {', '.join(metrics)}.")
            raise
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


def report(search: SearchState, trial: Any, step: int, metrics: dict[str, float]) -> Exception | None:
    """Report an evaluation during training to Optuna, or to a sweep; outside of a search do nothing.

    Returns:
        the `optuna.TrialPruned` to raise if the pruner ends the trial.

    Raises:
        SearchMistake: the objective is no number.
    """
    if not is_search_trial(search, trial):
        return None
    search.objective = evaluate_objective(search.compute_objective, metrics)
    if isinstance(search.objective, list):
        return None
    if hasattr(trial, "reported"):
        # For the record; the server receives the tracker's metrics.
        trial.reported.append((step, search.objective))
    if search.backend != HPSearchBackend.OPTUNA:
        return None
    should_prune = False
    # The fixed trial of the other processes belongs to no study.
    if hasattr(trial, "study"):
        trial.report(search.objective, step)
        should_prune = trial.should_prune()
    if not broadcast_object(should_prune):
        return None
    pruned = importlib.import_module("optuna").TrialPruned(f"Trial {trial.number} was pruned at step {step}.")
    setattr(pruned, ENDED_FOR_CALLBACKS, True)
    return pruned


def get_trial_id(backend: Any, trial: Any) -> Any:
    if backend == HPSearchBackend.RAY:
        return importlib.import_module("ray.tune").get_context().get_trial_id()
    if backend == HPSearchBackend.WANDB:
        return trial.run_id if hasattr(trial, "run_id") else importlib.import_module("wandb").run.id
    return getattr(trial, "number", "")


def get_trial_folder(search: SearchState, output_dir: str, trial: Any) -> str:
    """Return the folder of a training's checkpoints, in a search with the trial's name."""
    if not is_search_trial(search, trial):
        return output_dir
    name = f"run-{get_trial_id(search.backend, trial)}" if search.name is None else search.name(trial)
    if not isinstance(name, str) or not name:
        raise SearchMistake(f"hp_name returned {name!r} ({kind_of(name)}); it has to return the trial's name as text.")
    return os.path.join(output_dir, name)
