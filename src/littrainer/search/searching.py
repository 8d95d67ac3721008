"""`Trainer.hyperparameter_search` with the checks of its input, and `Trainer.apply_best`."""

from __future__ import annotations

import contextlib
import copy
import importlib
import operator
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from littrainer.arguments.accelerator_config import AcceleratorConfig
from littrainer.arguments.choices import HPSearchBackend
from littrainer.arguments.did_you_mean import suggest_name
from littrainer.callbacks.progress import has_log_display
from littrainer.callbacks.trainer_context import TrainerContext
from littrainer.checkpoint.remote import upload_files
from littrainer.loop.overrides import find_overrides
from littrainer.runtime.nested_values import map_nested
from littrainer.runtime.notes import kind_of
from littrainer.runtime.remote_folder import get_remote_url
from littrainer.search.backends import find_backend
from littrainer.search.parameters import call_space, get_drawn_parameters, has_changed, set_parameters
from littrainer.search.record import BestRun, UnreadableRecord, format_best_trials, load_search_record
from littrainer.search.trial import default_compute_objective

DIRECTIONS = ("minimize", "maximize")


def hyperparameter_search(
    trainer: TrainerContext,
    hp_space: Callable[[Any], dict[str, Any]] | None,
    compute_objective: Callable[[dict[str, float]], Any] | None,
    n_trials: int | None,
    direction: str | Sequence[str],
    backend: Any,
    hp_name: Callable[[Any], str] | None,
    **kwargs: Any,
) -> BestRun | list[BestRun]:
    key, library = find_backend(backend)
    if trainer.model_init is None:
        raise RuntimeError(
            "hyperparameter_search makes a new model for each trial: pass model_init to the Trainer instead of model."
        )
    if trainer.hp_search_backend is not None or trainer.is_in_train:
        raise RuntimeError("hyperparameter_search was called while this Trainer trains or searches; wait for its end.")
    for name, function in {"hp_space": hp_space, "compute_objective": compute_objective, "hp_name": hp_name}.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name} is {kind_of(function)}, and has to be a function.")
    n_trials = _check_number_of_trials(n_trials, key)
    direction = _check_direction(direction)
    # A script's backend may support several objectives.
    if key in (HPSearchBackend.RAY, HPSearchBackend.WANDB) and isinstance(direction, list):
        raise ValueError(
            f"direction={direction!r}: only Optuna searches with several objectives; pass backend='optuna', or one "
            "direction."
        )
    if key == HPSearchBackend.RAY and get_remote_url(trainer.args.output_dir):
        raise ValueError("The trials of Ray Tune are not uploaded to an output_dir that is a URL. Give a folder.")
    if trainer.train_dataset is None and not find_overrides(trainer, "get_train_dataloader"):
        raise ValueError("hyperparameter_search needs a train_dataset: pass one to the Trainer.")
    if trainer.eval_dataset is None and not find_overrides(trainer, "evaluate", "get_eval_dataloader", "_evaluate"):
        raise ValueError(
            "hyperparameter_search compares evaluations, and there is no eval_dataset: pass one to the Trainer."
        )
    search = trainer.session.search
    search.space, search.name = hp_space or library.default_hp_space, hp_name
    search.compute_objective = compute_objective or default_compute_objective
    with searching(trainer, key):
        best: Any = library.run(trainer, n_trials, direction, **kwargs)  # type: ignore[arg-type]
    if trainer.args.should_save:
        upload_files(trainer.args.output_dir)
    if trainer.args.process_index == 0 and has_log_display(trainer.callback_handler.callbacks):
        # A script's backend may write no record.
        with contextlib.suppress(OSError, UnreadableRecord):
            if table := format_best_trials(load_search_record(trainer.args.output_dir)):
                print(f"{table}\nAll trials: littrainer report {shlex.quote(str(trainer.args.output_dir))}")
    return best


def _check_number_of_trials(n_trials: Any, backend: Any) -> int | None:
    """Return the number of trials; None, except with Ray, if something else ends the search."""
    if n_trials is None and backend != HPSearchBackend.RAY:
        return None
    is_number = hasattr(n_trials, "__index__") and not isinstance(n_trials, bool)
    # For Ray Tune -1 means no limit.
    if not is_number or (n_trials < 1 and not (n_trials == -1 and backend == HPSearchBackend.RAY)):
        kind = ValueError if is_number else TypeError
        raise kind(f"n_trials={n_trials!r} is no number of trials; give a whole number from 1 up.")
    return operator.index(n_trials)


def _check_direction(direction: Any) -> str | list[str]:
    has_several = isinstance(direction, (list, tuple))
    if has_several and not direction:
        raise ValueError("direction is an empty list; give one direction for each objective.")
    # Or a member of Optuna's enumeration.
    names = [str(getattr(entry, "name", entry)).lower() for entry in (direction if has_several else [direction])]
    for name in names:
        if name not in DIRECTIONS:
            near = suggest_name(name, DIRECTIONS)
            raise ValueError(f"direction={direction!r} is neither 'minimize' nor 'maximize' ({near}).")
    return names if has_several else names[0]


@contextlib.contextmanager
def searching(trainer: TrainerContext, backend: Any) -> Iterator[None]:
    """Run a search in the block, and restore the arguments after it.

    As in transformers the Trainer's state is not reset between trials, and the Trainer has no model afterwards.
    """
    args, search = trainer.args, trainer.session.search
    # A trial may change the containers.
    values = map_nested(
        lambda leaf: copy.copy(leaf) if isinstance(leaf, AcceleratorConfig) else leaf,
        vars(args),
        is_leaf=lambda part: type(part) not in (dict, list),
    )
    trainer.release_training_memory()
    search.backend = search.last_backend = backend
    try:
        yield
    finally:
        search.backend, search.keeps_best_trial = None, False
        trainer.release_training_memory()
        changed = {name for name, value in vars(args).items() if has_changed(value, values.get(name))}
        vars(args).clear()
        vars(args).update(values)
        plugin: Any = getattr(args, "deepspeed_plugin", None)
        if plugin is not None:
            # The last trial's plugin may be active in transformers.
            plugin.select()
        trainer.apply_changed_arguments(changed, makes_accelerator=False)
        search.arguments_after = dict(values)


def apply_best(trainer: TrainerContext, best: BestRun, hp_space: Callable[[Any], dict[str, Any]] | None) -> None:
    if not isinstance(best, BestRun):
        advice = "; it has several objectives, so choose one" if isinstance(best, list) else ""
        raise TypeError(f"apply_best takes a BestRun of hyperparameter_search, and got {kind_of(best)}{advice}.")
    space, search = hp_space, trainer.session.search
    if space is None and search.last_backend == HPSearchBackend.OPTUNA:
        space = search.space
    trial: Any = get_drawn_parameters(best.hyperparameters)
    parameters = trial
    if space is not None:
        # The space may derive arguments from drawn values of other names.
        optuna: Any = importlib.import_module("optuna")
        number = int(best.run_id) if str(best.run_id).isdigit() else 0
        trial = optuna.trial.FixedTrial(best.hyperparameters, number)
        parameters = call_space(space, trial)
    seed_of_model = search.seeds_of_models.get(best.run_id, trainer.args.seed)
    trainer.apply_changed_arguments(set_parameters(trainer.args, parameters))
    search.seed_for_model = {trainer.args.seed: seed_of_model}
    if search.arguments_after is not None:
        # Detect only later changes by the script.
        search.arguments_after = dict(vars(trainer.args))
    search.best_trial = trial
