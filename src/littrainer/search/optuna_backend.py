"""A search with Optuna: the study, what becomes of each trial, and what the search leaves behind."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import os
import socket
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from littrainer.arguments.did_you_mean import suggestion
from littrainer.distributed.agreement import LostProcess
from littrainer.distributed.failure_report import is_running
from littrainer.errors.lazy_isinstance import is_a
from littrainer.search.distributed_search import refuse_several_processes, searched_by_all
from littrainer.search.optuna_workers import FOLDER, Workers, note_folder, number_of_jobs
from littrainer.search.parameters import SearchMistake
from littrainer.search.record import (
    COMPLETE,
    FAILED,
    PRUNED,
    RUNNING,
    BestRun,
    SearchRecord,
    TrialRecord,
    error_in_a_line,
    of_optuna,
)
from littrainer.search.trial import TRIAL_FAILURES, fails_trial_only

logger = logging.getLogger(__name__)

SEARCH, ERROR = "littrainer:search", "littrainer:error"
"""Attributes of a trial: the id of its search; what failed."""
NOTE_PREFIX = "littrainer:search:"
"""A study's attribute of this name and a search's id holds what process runs the search, and None when it is over."""

STATES = {"COMPLETE": COMPLETE, "PRUNED": PRUNED, "FAIL": FAILED, "RUNNING": RUNNING}
"""Optuna's states of trials -> the record's; one that waits is no trial yet."""
INTERRUPTED = "it was interrupted"


def run_hp_search_optuna(
    trainer: Any, n_trials: int | None, direction: str | Sequence[str], **kwargs: Any
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
    catch = for_optimize.pop("catch", None)
    # By default what hyperparameters can bring about.
    catch = TRIAL_FAILURES if catch is None else tuple(catch) if isinstance(catch, Iterable) else (catch,)
    jobs = number_of_jobs(trainer.args, for_optimize.pop("n_jobs", 1))
    if jobs != 1:
        refuse_several_processes(trainer.args, f"n_jobs={kwargs['n_jobs']}")
    callbacks = list(for_optimize.pop("callbacks", None) or ())
    directions: Any = [direction] if isinstance(direction, str) else list(direction)
    storage = for_study.pop("storage", None)

    def search(run: Callable[[Any], Any]) -> BestRun | list[BestRun]:
        with tempfile.TemporaryDirectory(prefix="littrainer-search-") as folder:
            shared = storage if jobs == 1 else _storage_for_several(storage, folder)
            study = optuna.create_study(storage=shared, directions=directions, **for_study)
            _check_directions(study, directions)
            with carried_on(study, n_trials if storage is not None else None) as (search_id, left):
                record = SearchRecord(trainer, "optuna", directions, study.study_name, study.metric_names)
                trials = OptunaTrials(trainer, study, run, search_id, catch, record)
                keywords = {"n_trials": n_trials if left is None else left, **for_optimize, "n_jobs": jobs}
                keywords["callbacks"] = [trials.keep_record, *callbacks]
                try:
                    if jobs == 1:
                        trials.optimize(**keywords)
                    else:
                        # Ctrl-C reaches this thread, which ends the workers; then the other one ends.
                        with ThreadPoolExecutor(1) as other_thread, Workers(trainer, study, jobs) as workers:
                            trials.run, trials.end_others = workers.run, workers.end
                            other_thread.submit(trials.optimize, **keywords).result()
                finally:
                    trials.keep_record()
            return best_runs(study)

    return searched_by_all(trainer, search)


def keywords_told_apart(keywords: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keywords for `optuna.create_study`, and those for `optuna.Study.optimize`."""
    import optuna

    of_study = inspect.signature(optuna.create_study).parameters.keys() - {"direction", "directions"}
    of_optimize = inspect.signature(optuna.Study.optimize).parameters.keys() - {"self", "func", "n_trials"}
    for name in keywords.keys() - of_study - of_optimize:
        near = suggestion(name, ["direction", *of_study, *of_optimize])
        raise TypeError(
            f"hyperparameter_search was given {name}, which neither optuna.create_study nor optuna.Study.optimize "
            f"takes ({near})."
        )
    for_study = {name: value for name, value in keywords.items() if name in of_study}
    return for_study, {name: value for name, value in keywords.items() if name in of_optimize}


# ---- The storage -----------------------------------------------------------------------------------------------------


def _storage_for_several(storage: Any, folder: str) -> Any:
    """Return a storage that several processes can write to: the user's, or a file for a study in memory."""
    from optuna.storages import InMemoryStorage, JournalStorage
    from optuna.storages.journal import JournalFileBackend

    if isinstance(storage, InMemoryStorage):
        raise SearchMistake(
            "n_jobs runs trials in several processes, which cannot share an InMemoryStorage: leave storage out, or "
            "give optuna.storages.JournalStorage or the address of a database."
        )
    return JournalStorage(JournalFileBackend(os.path.join(folder, "study.log"))) if storage is None else storage


def _check_directions(study: Any, directions: list[str]) -> None:
    of_study = [direction.name.lower() for direction in study.directions]
    if of_study != directions:
        given, made_for = (value[0] if len(value) == 1 else value for value in (directions, of_study))
        raise ValueError(
            f"direction={given!r}, and the study {study.study_name!r} in this storage was made for {made_for!r}: "
            f"pass direction={made_for!r}, or another study_name."
        )


# ---- A search that was killed ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def carried_on(study: Any, n_trials: int | None) -> Iterator[tuple[str, int | None]]:
    """Yield the id of the search to run in the block, and how many of its trials are left.

    A search of as many trials in this study, of this machine, that was killed, interrupted or ended with an error goes
    on. Its interrupted trials are done again, and the sampler draws other numbers than at its start.

    Parameters:
        n_trials: trials of the search; None for a study that is not kept, or if time decides.
    """
    if n_trials is None:
        yield uuid.uuid4().hex, None
        return
    host, process = socket.gethostname(), os.getpid()
    search_id, left = uuid.uuid4().hex, n_trials
    for name, note in study.user_attrs.items():
        if not name.startswith(NOTE_PREFIX) or not note or (note["host"], note["n_trials"]) != (host, n_trials):
            continue
        if note["pid"] == process or not is_running(note["pid"]):
            search_id = name.removeprefix(NOTE_PREFIX)
            left = _go_on(study, search_id, n_trials)
            break
    study.set_user_attr(f"{NOTE_PREFIX}{search_id}", {"host": host, "pid": process, "n_trials": n_trials})
    yield search_id, left
    study.set_user_attr(f"{NOTE_PREFIX}{search_id}", None)


def _go_on(study: Any, search_id: str, n_trials: int) -> int:
    """Have the interrupted trials of a search done again, and return how many of its trials are left."""
    from optuna.trial import TrialState

    own = [trial for trial in study.get_trials(deepcopy=False) if trial.user_attrs.get(SEARCH) == search_id]
    for trial in own:
        if not trial.state.is_finished():
            _do_again(study, trial)
            study.tell(trial.number, state=TrialState.FAIL)
    # Neither killed nor interrupted.
    ended = sum(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) or ERROR in trial.user_attrs for trial in own)
    study.sampler.reseed_rng()
    logger.warning(
        f"The study {study.study_name!r} holds a search that ended before its time, and this one goes on with it: "
        f"{ended} of its {n_trials} trials have ended."
    )
    return max(0, n_trials - ended)


def _do_again(study: Any, trial: Any) -> None:
    from optuna.trial import TrialState, create_trial

    drawn = {"params": trial.params, "distributions": trial.distributions, "system_attrs": trial.system_attrs}
    study.add_trial(create_trial(state=TrialState.WAITING, **drawn))


# ---- Trials ----------------------------------------------------------------------------------------------------------


class OptunaTrials:
    """The trials of one search in a study.

    Parameters:
        run: trains with a trial, and returns its objective or raises what ended it.
        search_id: what the trials of this search are known by.
        catch: errors of a trial after which the search goes on.
        record: what is kept of the trials.
    """

    def __init__(
        self,
        trainer: Any,
        study: Any,
        run: Callable[[Any], Any],
        search_id: str,
        catch: tuple[type[Exception], ...],
        record: SearchRecord,
    ):
        self.trainer, self.study, self.run = trainer, study, run
        self.search_id, self.catch, self.record = search_id, catch, record
        # Ends the trials that run at the same time.
        self.end_others: Callable[[], None] = lambda: None
        # The error that ends the search.
        self.error: Exception | None = None
        self._lock = threading.Lock()

    def optimize(self, **keywords: Any) -> None:
        """Run trials; the keywords are those of `Study.optimize`."""
        try:
            self.study.optimize(self.objective, catch=self.catch, **keywords)
        except KeyboardInterrupt:
            # With it end the trials that ran when another one failed.
            if self.error is None:
                raise
        if self.error is not None:
            raise self.error

    def objective(self, trial: Any) -> Any:
        """Run a trial; Optuna calls this for each."""
        trial.set_user_attr(SEARCH, self.search_id)
        try:
            found = self.run(trial)
            values = found if isinstance(found, list) else [found]
            if len(values) != len(self.study.directions):
                raise SearchMistake(
                    f"compute_objective returned {len(values)} numbers ({found!r}), and direction names "
                    f"{len(self.study.directions)}: give as many directions as there are objectives."
                )
            if any(map(math.isnan, values)):
                # Optuna takes such a trial for failed.
                trial.set_user_attr(ERROR, "the objective is nan")
            return found
        except KeyboardInterrupt:
            # A call that goes on with the search does it again.
            _do_again(self.study, self.study._storage.get_trial(trial._trial_id))
            raise
        except Exception as error:
            if is_a(error, "pruned trial"):
                raise
            trial.set_user_attr(ERROR, error_in_a_line(error))
            is_caught = isinstance(error, self.catch) and not isinstance(error, SearchMistake | LostProcess)
            if not is_caught or (self.catch is TRIAL_FAILURES and not fails_trial_only(error)):
                self.error = self.error or error
                self.study.stop()
                self.end_others()
            raise
        finally:
            note_folder(self.trainer, trial)

    def keep_record(self, *_: Any) -> None:
        """Write what has become of the trials of the study; Optuna calls this after each trial."""
        with self._lock:
            self.record.update(records_of(self.study))


def records_of(study: Any) -> list[TrialRecord]:
    """Return all trials of a study, as the record of a search holds them."""
    return [record_of(trial) for trial in study.get_trials(deepcopy=False) if trial.state.name in STATES]


def record_of(trial: Any) -> TrialRecord:
    """Return one of a study's trials, as the record of a search holds it."""
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
    """Return the best trial of a study, or with several objectives all that none surpasses."""
    records = records_of(study)
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
    message = f"None of {len(records)} trials was completed: {len(failed)} failed and {pruned} pruned."
    if not failed:
        return message
    return (
        f"{message} The first failure, in trial {failed[0].id} with {failed[0].parameters}: {failed[0].error}. "
        "With catch=() a search ends at the first failure and shows where it came from."
    )
