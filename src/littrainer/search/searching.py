"""`Trainer.hyperparameter_search`: what it is given is checked, and a backend carries it out."""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from littrainer.arguments.choices import HPSearchBackend
from littrainer.arguments.did_you_mean import suggestion
from littrainer.errors.notes import kind_of
from littrainer.search.backends import chosen_backend
from littrainer.search.objective import default_compute_objective
from littrainer.search.preserved import Found, left_as_found
from littrainer.search.reporting import name_by
from littrainer.search.results import BestRun
from littrainer.search.trial_parameters import differs

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)

DIRECTIONS = ("minimize", "maximize")
# In transformers a Trainer reads them when it is made, and a trial's values have no effect.
COUNT_HERE_ALONE = ("label_smoothing_factor", "neftune_noise_alpha")


class Search:
    """The search that goes on.

    Parameters:
        directions: one for each objective.
        found: what the Trainer was when the search began; None in the process of a single trial.

    Attributes:
        checkpoints_there: those that lay in the folder of the trial at hand when it began; None before that.
    """

    def __init__(self, directions: Sequence[str], found: Found | None):
        self.directions = list(directions)
        self.found = found
        self.checkpoints_there: list[str] | None = None
        self._told: set[str] = set()
        # What trials have set, and the callbacks whose states the one before has changed.
        self._set_by_trials: dict[str, Any] = {}
        self._changed_callbacks: list[str] = []
        # A trial, and what `hp_name` calls it.
        self._named: tuple[Any, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # In the process of a trial the Trainer is as it was found.
        return {**vars(self), "found": None, "_named": None}

    def begin_trial(self, trainer: Trainer, trial: Any) -> None:
        """Let a trial find the Trainer as the search did."""
        self.checkpoints_there = None
        # All parameters of a dict are known beforehand; any other name may have been asked for too early.
        if self._named is not None and not (isinstance(trial, Mapping) and trial is self._named[0]):
            self._named = None
        if self.found is not None:
            self._changed_callbacks = self.found.begin_trial(trainer)

    def tell_of_differences(self, args: Any, before: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
        """Warn, once of each, of what this trial trains with otherwise than in transformers.

        Parameters:
            args: the arguments of the trial.
            before: their values before the trial set its own.
            parameters: what it has set.
        """
        anew = [
            name
            for name, value in self._set_by_trials.items()
            if name not in parameters and differs(value, getattr(args, name))
        ]
        for name in [*anew, *self._changed_callbacks]:
            self._tell(f"Each trial begins with {name} as the search did; transformers keeps what a trial made of it.")
        for name, value in parameters.items():
            if name not in before:
                continue
            counts, old = getattr(args, name), before[name]
            self._set_by_trials[name] = counts
            if name in COUNT_HERE_ALONE and differs(counts, old):
                self._tell(f"{name} of a trial counts; transformers trains with that of the Trainer's construction.")
            with contextlib.suppress(TypeError, ValueError):
                if old is not None and counts is not None and differs(counts, theirs := type(old)(value)):
                    self._tell(
                        f"{name} of a trial is {counts!r}; transformers makes it {theirs!r}, of the former type."
                    )

    def _tell(self, difference: str) -> None:
        if difference not in self._told:
            self._told.add(difference)
            logger.warning(difference)

    def name_of(self, trial: Any, hp_name: Callable[[Any], str]) -> str:
        """What the script's `hp_name` calls a trial; asked once for each, since the answer may be another each time.

        Raises:
            SearchMistake: it returns something else than a text.
        """
        named = self._named
        if named is None or not _are_the_same(named[0], trial):
            named = self._named = trial, name_by(hp_name, trial)
        return named[1]

    def tell_of_same_model(self, trainer: Trainer) -> None:
        """Warn, once, of a model_init that makes no new model, so that a trial goes on with the weights of another."""
        is_same = self.found is not None and trainer.model is not None and trainer.model is self.found.model
        if is_same:
            self._tell(
                "model_init returned a model that it had returned before, so each trial goes on with the weights of "
                "the one before it. Make the model inside model_init."
            )


def _are_the_same(trial: Any, other: Any) -> bool:
    # One of several processes has the study's trial under a class of its own.
    number = getattr(trial, "number", None)
    return trial is other or (number is not None and number == getattr(other, "number", None))


def hyperparameter_search(
    trainer: Trainer,
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
    if trainer._search is not None or trainer.is_in_train:
        raise RuntimeError("hyperparameter_search was called while this Trainer trains or searches; wait for its end.")
    _check_functions(hp_space=hp_space, compute_objective=compute_objective, hp_name=hp_name)
    n_trials = checked_number_of_trials(n_trials, key)
    direction = checked_direction(direction)
    # What a script's own backend can do is its own matter.
    if key in (HPSearchBackend.RAY, HPSearchBackend.WANDB) and isinstance(direction, list):
        raise ValueError(
            f"direction={direction!r}: only Optuna searches with several objectives; pass backend='optuna', or one "
            "direction."
        )
    _check_data(trainer)
    trainer.hp_space = library.default_hp_space if hp_space is None else hp_space
    trainer.hp_name = hp_name
    trainer.compute_objective = default_compute_objective if compute_objective is None else compute_objective
    with searching(trainer, key, direction):
        return library.run(trainer, n_trials, direction, **kwargs)  # type: ignore[arg-type]


@contextlib.contextmanager
def searching(trainer: Trainer, backend: Any, direction: str | Sequence[str]) -> Iterator[Search]:
    """While the block runs a Trainer's trainings with a trial are trials of a search; afterwards it is as it was.

    Parameters:
        backend: a member of HPSearchBackend, or the name of a script's own backend.
        direction: `minimize` or `maximize`, or a list of them.
    """
    with left_as_found(trainer) as found:
        trainer._search = Search([direction] if isinstance(direction, str) else direction, found)
        trainer.hp_search_backend = trainer._last_search_backend = backend
        try:
            yield trainer._search
        finally:
            trainer._search = None
            trainer.hp_search_backend = None


def _check_functions(**functions: Any) -> None:
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name} is {kind_of(function)}, and has to be a function.")


def checked_number_of_trials(n_trials: Any, backend: Any) -> int | None:
    """The number of trials; None, with Optuna and with a sweep, where something else ends the search.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is below 1.
    """
    if n_trials is None and backend != HPSearchBackend.RAY:
        return None
    if isinstance(n_trials, bool) or not hasattr(n_trials, "__index__"):
        raise TypeError(f"n_trials={n_trials!r} is {kind_of(n_trials)}; give a whole number from 1 up.")
    # Ray Tune takes -1 for as many as time allows.
    if n_trials < 1 and not (n_trials == -1 and backend == HPSearchBackend.RAY):
        raise ValueError(f"n_trials={n_trials} searches nothing; give a whole number from 1 up.")
    return operator.index(n_trials)


def checked_direction(direction: Any) -> str | list[str]:
    """The direction of a search, or a list of them for several objectives.

    Raises:
        TypeError: it is neither a text nor a list.
        ValueError: a direction is unknown, or the list is empty.
    """
    if isinstance(direction, (list, tuple)):
        if not direction:
            raise ValueError("direction is an empty list; give one direction for each objective.")
        return [_one_direction(one) for one in direction]
    return _one_direction(direction)


def _one_direction(direction: Any) -> str:
    # Optuna's own enumeration has the same names.
    name = direction if isinstance(direction, str) else getattr(direction, "name", direction)
    if not isinstance(name, str):
        raise TypeError(f"direction={direction!r} is {kind_of(direction)}; give 'minimize' or 'maximize'.")
    if name.lower() not in DIRECTIONS:
        raise ValueError(
            f"direction={direction!r} is neither 'minimize' nor 'maximize' ({suggestion(name, DIRECTIONS)})."
        )
    return name.lower()


def _check_data(trainer: Trainer) -> None:
    if trainer.train_dataset is None and not trainer._own_methods("get_train_dataloader"):
        raise ValueError("hyperparameter_search needs a train_dataset: pass one to the Trainer.")
    if trainer.eval_dataset is None and not trainer._own_methods("evaluate", "get_eval_dataloader", "_evaluate"):
        raise ValueError(
            "hyperparameter_search compares evaluations, and there is no eval_dataset: pass one to the Trainer."
        )
