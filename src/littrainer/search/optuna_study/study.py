"""A search with Optuna: the study, what becomes of each trial, and what the search leaves behind."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from littrainer.arguments.choices import IntervalStrategy
from littrainer.arguments.did_you_mean import suggestion
from littrainer.errors.lazy_isinstance import is_a
from littrainer.errors.notes import kind_of
from littrainer.search.distributions import of_optuna
from littrainer.search.failures import TRIAL_FAILURES, ObjectiveIsNan, SearchMistake, fails_trial_only
from littrainer.search.optuna_study.unfinished import ERROR, SEARCH, UnfinishedSearch, carried_on
from littrainer.search.record import (
    COMPLETE,
    FAILED,
    PRUNED,
    RUNNING,
    SearchRecord,
    TrialRecord,
    error_in_a_line,
)
from littrainer.search.results import BestRun
from littrainer.search.side_by_side.pool import SideBySide, number_of_jobs
from littrainer.search.together.search import refuse_side_by_side, searched_together
from littrainer.search.trial import SEEDS

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)

FOLDER = "littrainer:folder"
"""Under this name a trial of a study keeps its run folder."""

STATES = {"COMPLETE": COMPLETE, "PRUNED": PRUNED, "FAIL": FAILED, "RUNNING": RUNNING}
"""Optuna's states of trials -> the record's; one that waits is no trial yet."""

# A trial that failed by itself says with what.
INTERRUPTED = "it was interrupted"

# What a database says -> what to do.
STORAGE_FAULTS = {
    "is locked": "Another process writes to it: wait until that has ended, or end it. Where several search in one "
    "study, use a database server or optuna.storages.JournalStorage.",
    "malformed|not a database|DecodeError|Invalid log format": "The file is damaged: put a copy in its place, or "
    "search in another storage.",
    "": 'See whether its folder or server is there and can be written to; an address is as "sqlite:///search.db".',
}

# Given by hyperparameter_search itself.
NOT_FOR_CREATE_STUDY = ("direction", "directions")
NOT_FOR_OPTIMIZE = ("self", "func", "n_trials")


def run_hp_search_optuna(
    trainer: Trainer, n_trials: int | None, direction: str | Sequence[str], **kwargs: Any
) -> BestRun | list[BestRun]:
    """Search with Optuna, as `Trainer.hyperparameter_search` describes it.

    Parameters:
        n_trials: how many trials, None for as many as `timeout` allows; without that, until the study is stopped.
        direction: `minimize` or `maximize`, or a list of them.
        kwargs: keywords of `optuna.create_study` and `optuna.Study.optimize`.

    Raises:
        TypeError: a keyword that neither of them takes.
        ValueError: the study that is gone on with has other directions.
        RuntimeError: no trial was completed.
    """
    import optuna

    for_study, for_optimize = keywords_told_apart(kwargs)
    catch = caught_errors(for_optimize.pop("catch", None))
    jobs = number_of_jobs(trainer.args, for_optimize.pop("n_jobs", 1))
    if jobs != 1:
        refuse_side_by_side(trainer, f"n_jobs={kwargs['n_jobs']}")
    if not isinstance(for_optimize.get("callbacks") or (), Iterable):
        raise TypeError(f"callbacks={for_optimize['callbacks']!r} has to be a list of functions.")
    directions: Any = [direction] if isinstance(direction, str) else list(direction)
    is_stored = for_study.get("storage") is not None

    def search(run: Callable[[Any], Any]) -> BestRun | list[BestRun]:
        _warn_of_idle_pruner(trainer, for_study.get("pruner"), directions)
        if n_trials is None:
            _warn_of_no_end(for_study.get("sampler"), for_optimize)
        if is_stored and for_study.get("study_name") is None:
            logger.warning(
                "storage without study_name: the study gets a name of its own, so nothing can go on with this search "
                "if it is killed. Pass study_name and load_if_exists=True."
            )
        with contextlib.ExitStack() as stack:
            stack.enter_context(_naming_storage(for_study.get("storage")))
            study = optuna.create_study(directions=directions, **for_study)
            _check_directions(study, directions)
            unfinished = stack.enter_context(carried_on(study, trainer, n_trials, is_stored=is_stored, jobs=jobs))
            if jobs != 1:
                run = stack.enter_context(SideBySide(trainer, jobs, survives=catch)).run
            trials = _Trials(trainer, study, directions, run, catch, unfinished)
            trials.carry_out(jobs, for_optimize)
            return best_runs(study)

    return searched_together(trainer, search)


def keywords_told_apart(keywords: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keywords for `optuna.create_study`, and those for `optuna.Study.optimize`.

    Raises:
        TypeError: one that neither takes; it names the nearest.
    """
    import optuna

    of_study = _parameters_of(optuna.create_study, NOT_FOR_CREATE_STUDY)
    of_optimize = _parameters_of(optuna.Study.optimize, NOT_FOR_OPTIMIZE)
    for name in keywords:
        if name in NOT_FOR_CREATE_STUDY:
            raise TypeError(f"hyperparameter_search takes a list of directions as direction=[...], not as {name}.")
        if name not in of_study and name not in of_optimize:
            raise TypeError(
                f"hyperparameter_search was given {name}, which neither optuna.create_study nor "
                f"optuna.Study.optimize takes ({suggestion(name, [*of_study, *of_optimize])})."
            )
    return (
        {name: value for name, value in keywords.items() if name in of_study},
        {name: value for name, value in keywords.items() if name not in of_study},
    )


def _parameters_of(function: Callable[..., Any], without: tuple[str, ...]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in without]


def caught_errors(catch: Any) -> tuple[type[Exception], ...]:
    """Errors of a trial after which the search goes on.

    Parameters:
        catch: None for what hyperparameters can bring about; or an exception class, or several. An objective that is
            nan counts among them, unless they are none.

    Raises:
        TypeError: it is something else.
    """
    if catch is None:
        return TRIAL_FAILURES
    classes = (catch,) if isinstance(catch, type) else tuple(catch) if isinstance(catch, Iterable) else (catch,)
    for one in classes:
        if not (isinstance(one, type) and issubclass(one, Exception)):
            raise TypeError(f"catch={catch!r}: {one!r} is {kind_of(one)}; give exception classes, such as ValueError.")
    return (*classes, ObjectiveIsNan) if classes else ()


@contextlib.contextmanager
def _naming_storage(storage: Any) -> Iterator[None]:
    """Within it an error of a study's database becomes one that names it and says what to do."""
    try:
        yield
    except Exception as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        # A dataset of the script's may read from a database too.
        calls = [at.f_code.co_name for at in frames if str(at.f_globals.get("__name__")).startswith("optuna.storages.")]
        if not calls or not (is_a(error, "storage error") or "read_logs" in calls):
            raise
        said = f"{error!r} {error.__cause__}"
        advice = next(words for sign, words in STORAGE_FAULTS.items() if re.search(sign, said))
        reason = str(error.__cause__ or error).splitlines()[0]
        address = _address_of(storage)
        raise RuntimeError(f"The storage of the search, {address}, cannot be used ({reason}). {advice}") from error


def _address_of(storage: Any) -> str:
    """The URL of a study's database without a password, or the file of a journal."""
    from sqlalchemy import exc, make_url

    backend = getattr(storage, "_backend", storage)
    url = storage if isinstance(storage, str) else getattr(backend, "url", None)
    if url is None:
        return str(getattr(backend, "_file_path", type(backend).__name__))
    try:
        # Also the query may have a password.
        return unquote(make_url(url).set(query={}).render_as_string(hide_password=True))
    except exc.ArgumentError:
        return str(url.rpartition("@")[2])


def _warn_of_idle_pruner(trainer: Trainer, pruner: Any, directions: list[str]) -> None:
    import optuna

    if pruner is None or isinstance(pruner, optuna.pruners.NopPruner):
        return
    if len(directions) > 1:
        reason = "Optuna prunes by one objective only, and there are several"
    elif trainer.args.eval_strategy == IntervalStrategy.NO:
        reason = 'no evaluation takes place during training; set eval_strategy="epoch" or "steps"'
    else:
        return
    logger.warning(f"pruner={type(pruner).__name__} will prune no trial: {reason}.")


def _warn_of_no_end(sampler: Any, for_optimize: dict[str, Any]) -> None:
    import optuna

    ends_itself = isinstance(sampler, optuna.samplers.GridSampler | optuna.samplers.BruteForceSampler)
    if not ends_itself and for_optimize.get("timeout") is None and not for_optimize.get("callbacks"):
        logger.warning(
            "n_trials=None without timeout: trials are run until something calls Study.stop() or the search is "
            "interrupted. Pass n_trials, or timeout in seconds."
        )


def _check_directions(study: Any, directions: list[str]) -> None:
    of_study = [direction.name.lower() for direction in study.directions]
    if of_study != directions:
        given, made_for = (value[0] if len(value) == 1 else value for value in (directions, of_study))
        raise ValueError(
            f"direction={given!r}, and the study {study.study_name!r} in this storage was made for {made_for!r}: "
            f"pass direction={made_for!r}, or another study_name."
        )


class _Trials:
    """The trials of one search in a study.

    Parameters:
        directions: one for each objective.
        run: trains with a trial, and returns its objective or raises what ended it.
        catch: errors of a trial after which the search goes on.
        unfinished: what is left of the search.
    """

    def __init__(
        self,
        trainer: Trainer,
        study: Any,
        directions: list[str],
        run: Callable[[Any], Any],
        catch: tuple[type[Exception], ...],
        unfinished: UnfinishedSearch,
    ):
        self.trainer, self.study = trainer, study
        self.run, self.catch, self.unfinished = run, catch, unfinished
        self.callbacks: Iterable[Callable[[Any, Any], object]] = ()
        names = study.metric_names
        self.record = SearchRecord(trainer, "optuna", directions, study.study_name, names)
        # Trials side by side end in threads of their own.
        self.lock = threading.Lock()
        # An error that ends the search though `catch` names its class, or with trials side by side.
        self.mistake: Exception | None = None

    def carry_out(self, jobs: int, keywords: dict[str, Any]) -> None:
        """Run what is left of the search.

        Parameters:
            jobs: trials at once.
            keywords: further ones for `Study.optimize`.
        """
        if self.unfinished.n_left == 0:
            return
        self.callbacks = keywords.pop("callbacks", None) or ()
        try:
            self.study.optimize(
                self.objective,
                n_trials=self.unfinished.n_left,
                n_jobs=jobs,
                catch=self.catch,
                callbacks=[self.end_trial],
                **keywords,
            )
        finally:
            self.record.update(self.records())
        if self.mistake is not None:
            raise self.mistake

    def objective(self, trial: Any) -> Any:
        """What Optuna calls for each trial."""
        trial.set_user_attr(SEARCH, self.unfinished.id)
        seed = self.trainer.args.seed
        trial.set_user_attr(SEEDS, [seed])
        try:
            return self.run(trial)
        except Exception as error:
            if not is_a(error, "pruned trial"):
                trial.set_user_attr(ERROR, error_in_a_line(error))
            caught_by_default = self.catch is TRIAL_FAILURES and isinstance(error, self.catch)
            if isinstance(error, SearchMistake) or (caught_by_default and not fails_trial_only(error)):
                self.mistake = error
                self.study.stop()
            raise
        finally:
            trial.set_user_attr(SEEDS, [seed, self.trainer.args.seed])
            # A trial that failed early may lack what hp_name looks for.
            with contextlib.suppress(Exception):
                folder = self.trainer._get_output_dir(trial)
                if os.path.isdir(folder):
                    trial.set_user_attr(FOLDER, folder)
            self.unfinished.note_draws(trial.number)

    def end_trial(self, study: Any, trial: Any) -> None:
        """Record how a trial has ended, and tell the script; Optuna calls it after each that did not end the search."""
        with self.lock:
            self.record.update(self.records())
        try:
            for callback in self.callbacks:
                callback(study, trial)
        except Exception as error:
            # Optuna's threads would keep it to themselves.
            self.mistake = error
            study.stop()
            raise

    def records(self) -> list[TrialRecord]:
        """Of all trials of the study."""
        return [record_of(trial) for trial in self.study.get_trials(deepcopy=False) if trial.state.name in STATES]


def record_of(trial: Any) -> TrialRecord:
    """One of a study's trials, as the record of a search holds it."""
    state = STATES[trial.state.name]
    error = None
    if state == FAILED:
        error = trial.user_attrs.get(ERROR, INTERRUPTED if SEARCH in trial.user_attrs else None)
    values = trial.values if state == COMPLETE else None
    return TrialRecord(
        id=str(trial.number),
        state=state,
        objective=None if values is None else values[0] if len(values) == 1 else list(values),
        parameters=dict(trial.params),
        distributions={name: of_optuna(distribution) for name, distribution in trial.distributions.items()},
        intermediate=sorted(trial.intermediate_values.items()),
        seconds=None if trial.duration is None else trial.duration.total_seconds(),
        folder=trial.user_attrs.get(FOLDER),
        error=error,
    )


def best_runs(study: Any) -> BestRun | list[BestRun]:
    """The best trial of a study, or with several objectives all that none surpasses.

    Raises:
        RuntimeError: no trial was completed.
    """
    records = [record_of(trial) for trial in study.get_trials(deepcopy=False) if trial.state.name in STATES]
    if not any(record.state == COMPLETE for record in records):
        raise RuntimeError(_none_completed(records))
    if len(study.directions) > 1:
        return [BestRun(str(trial.number), trial.values, trial.params) for trial in study.best_trials]
    best = study.best_trial
    return BestRun(str(best.number), best.value, best.params)


def _none_completed(records: list[TrialRecord]) -> str:
    if not records:
        return "The search ended before any trial: give it more time (timeout), or look for what calls Study.stop()."
    failed = [record for record in records if record.state == FAILED]
    pruned = sum(record.state == PRUNED for record in records)
    counts = [f"{len(failed)} failed"] * bool(failed) + [f"{pruned} {'was' if pruned == 1 else 'were'} pruned"] * bool(
        pruned
    )
    message = f"None of {len(records)} trials was completed: {' and '.join(counts) or 'all are still running'}."
    if not failed:
        return message
    return (
        f"{message} The first failure, in trial {failed[0].id} with {failed[0].parameters}: {failed[0].error}. "
        "With catch=() a search ends at the first failure and shows where it came from."
    )
