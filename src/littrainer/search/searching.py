"""`Trainer.hyperparameter_search`, whose input is checked before a backend carries it out, and `Trainer.apply_best`."""

from __future__ import annotations

import contextlib
import importlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from littrainer.arguments.choices import HPSearchBackend
from littrainer.arguments.did_you_mean import suggestion
from littrainer.checkpoint.remote import send_files
from littrainer.errors.notes import kind_of
from littrainer.errors.remote_folder import address_of
from littrainer.search.backends import chosen_backend
from littrainer.search.parameters import asked, differs, drawn_in, set_parameters
from littrainer.search.record import BestRun
from littrainer.search.trial import (
    default_compute_objective,
    follow_arguments,
    release_memory,
)
from littrainer.training.overrides import own_methods

DIRECTIONS = ("minimize", "maximize")


def hyperparameter_search(
    trainer: Any,
    hp_space: Callable[[Any], dict[str, Any]] | None,
    compute_objective: Callable[[dict[str, float]], Any] | None,
    n_trials: int | None,
    direction: str | Sequence[str],
    backend: Any,
    hp_name: Callable[[Any], str] | None,
    **kwargs: Any,
) -> BestRun | list[BestRun] | None:
    """Carry out a search, as `Trainer.hyperparameter_search` describes it."""
    key, library = chosen_backend(backend)
    if trainer.model_init is None:
        raise RuntimeError(
            "hyperparameter_search makes a new model for each trial: pass model_init to the Trainer instead of model."
        )
    if trainer.hp_search_backend is not None or trainer.is_in_train:
        raise RuntimeError("hyperparameter_search was called while this Trainer trains or searches; wait for its end.")
    for name, function in {"hp_space": hp_space, "compute_objective": compute_objective, "hp_name": hp_name}.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name} is {kind_of(function)}, and has to be a function.")
    n_trials = checked_number_of_trials(n_trials, key)
    direction = checked_direction(direction)
    # What a script's own backend can do is its own matter.
    if key in (HPSearchBackend.RAY, HPSearchBackend.WANDB) and isinstance(direction, list):
        raise ValueError(
            f"direction={direction!r}: only Optuna searches with several objectives; pass backend='optuna', or one "
            "direction."
        )
    if key == HPSearchBackend.RAY and address_of(trainer.args.output_dir):
        raise ValueError("The trials of Ray Tune are not uploaded to an output_dir that is an address. Give a folder.")
    _check_data(trainer)
    search = trainer.session.search
    search.space, search.name = library.default_hp_space if hp_space is None else hp_space, hp_name
    search.compute_objective = default_compute_objective if compute_objective is None else compute_objective
    with searching(trainer, key):
        best = library.run(trainer, n_trials, direction, **kwargs)  # type: ignore[arg-type]
    if trainer.args.should_save:
        send_files(trainer.args.output_dir)
    return best


@contextlib.contextmanager
def searching(trainer: Any, backend: Any) -> Iterator[None]:
    """Let a Trainer's trainings with a trial be trials of a search in the block; its arguments are put back after it.

    As in transformers a trial begins with what the one before has left, and the Trainer has no model afterwards.

    Parameters:
        backend: a member of HPSearchBackend, or the name of a script's own backend.
    """
    args, values, search = trainer.args, dict(vars(trainer.args)), trainer.session.search
    release_memory(trainer)
    search.backend = search.last_backend = backend
    try:
        yield
    finally:
        search.backend = None
        release_memory(trainer)
        # A callback may have put others in their place.
        trainer.args = args
        changed = {name for name, value in vars(args).items() if differs(value, values.get(name))}
        vars(args).clear()
        vars(args).update(values)
        plugin: Any = getattr(args, "deepspeed_plugin", None)
        if plugin is not None:
            # transformers may know the plugin of the last trial.
            plugin.select()
        follow_arguments(trainer, changed, makes_accelerator=False)
        search.arguments_after = dict(values)


def checked_number_of_trials(n_trials: Any, backend: Any) -> int | None:
    """Return the number of trials; None, with Optuna and with a sweep, if something else ends the search."""
    if n_trials is None and backend != HPSearchBackend.RAY:
        return None
    if isinstance(n_trials, bool) or not hasattr(n_trials, "__index__"):
        raise TypeError(f"n_trials={n_trials!r} is {kind_of(n_trials)}; give a whole number from 1 up.")
    # Ray Tune takes -1 for as many as time allows.
    if n_trials < 1 and not (n_trials == -1 and backend == HPSearchBackend.RAY):
        raise ValueError(f"n_trials={n_trials} searches nothing; give a whole number from 1 up.")
    return operator.index(n_trials)


def checked_direction(direction: Any) -> str | list[str]:
    """Return the direction of a search, or a list of them for several objectives."""
    several = isinstance(direction, (list, tuple))
    if several and not direction:
        raise ValueError("direction is an empty list; give one direction for each objective.")
    # Optuna's own enumeration has the same names.
    names = [str(getattr(one, "name", one)).lower() for one in (direction if several else [direction])]
    for name in names:
        if name not in DIRECTIONS:
            near = suggestion(name, DIRECTIONS)
            raise ValueError(f"direction={direction!r} is neither 'minimize' nor 'maximize' ({near}).")
    return names if several else names[0]


def _check_data(trainer: Any) -> None:
    if trainer.train_dataset is None and not own_methods(trainer, ["get_train_dataloader"]):
        raise ValueError("hyperparameter_search needs a train_dataset: pass one to the Trainer.")
    evaluating = ("evaluate", "get_eval_dataloader", "_evaluate")
    if trainer.eval_dataset is None and not own_methods(trainer, evaluating):
        raise ValueError(
            "hyperparameter_search compares evaluations, and there is no eval_dataset: pass one to the Trainer."
        )


def apply_best(trainer: Any, best: BestRun, hp_space: Callable[[Any], dict[str, Any]] | None) -> None:
    """Set arguments to those of a trial, as `Trainer.apply_best` describes it."""
    if not isinstance(best, BestRun):
        advice = "; it has several objectives, so choose one" if isinstance(best, list) else ""
        raise TypeError(f"apply_best takes a BestRun of hyperparameter_search, and got {kind_of(best)}{advice}.")
    space, search = hp_space, trainer.session.search
    if space is None and search.last_backend == HPSearchBackend.OPTUNA:
        space = search.space
    trial: Any = drawn_in(best.hyperparameters)
    parameters = trial
    if space is not None:
        # What it asks the trial for may have other names than the arguments that it makes of them.
        optuna: Any = importlib.import_module("optuna")
        number = int(best.run_id) if str(best.run_id).isdigit() else 0
        trial = optuna.trial.FixedTrial(best.hyperparameters, number)
        parameters = asked(space, trial)
    seed_of_model = search.seeds_of_models.get(best.run_id, trainer.args.seed)
    follow_arguments(trainer, set_parameters(trainer.args, parameters))
    search.seed_for_model = {trainer.args.seed: seed_of_model}
    if search.arguments_after is not None:
        # What the script sets from here on decides over these.
        search.arguments_after = dict(vars(trainer.args))
    search.best_trial = trial
