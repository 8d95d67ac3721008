"""A search with Optuna: its study, the states of its trials, and its resumption."""

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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from littrainer.arguments.choices import IntervalStrategy
from littrainer.arguments.did_you_mean import suggest_name
from littrainer.callbacks.trainer_context import TrainerContext
from littrainer.distributed.failures import is_running
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.runtime.tracebacks import shorten_tracebacks
from littrainer.runtime.weak_attributes import load_in_thread
from littrainer.search.distributed_search import reject_multiple_processes, search_with_all
from littrainer.search.parameters import SearchMistake
from littrainer.search.record import (
    COMPLETE,
    FAILED,
    INTERRUPTED,
    PRUNED,
    RUNNING,
    BestRun,
    SearchRecord,
    TrialRecord,
    delete_models_of_other_trials,
    format_error,
    make_no_trial_error,
)
from littrainer.search.trial import TRIAL_FAILURES, is_trial_failure
from littrainer.search.trial_processes import TrialProcesses, count_jobs

logger = logging.getLogger(__name__)

SEARCH, ERROR, FOLDER = "littrainer:search", "littrainer:error", "littrainer:folder"
"""Attributes of a trial: the id of its search, the reason of its failure, its run folder."""
NOTE_PREFIX = "littrainer:search:"
"""Prefix, before a search's id, of the study's attribute for the process of the search; None after its end."""

STATES = {"COMPLETE": COMPLETE, "PRUNED": PRUNED, "FAIL": FAILED, "RUNNING": RUNNING}
"""Optuna's states of trials -> the record's; waiting trials have none."""


def run_hp_search_optuna(
    trainer: TrainerContext,
    n_trials: int | None,
    direction: str | Sequence[str],
    keep_best_trial: bool = False,
    **kwargs: Any,
) -> BestRun | list[BestRun]:
    """Search with Optuna, as `Trainer.hyperparameter_search` describes it."""
    optuna = load_in_thread(__import__, "optuna")
    study_names = inspect.signature(optuna.create_study).parameters.keys() - {"direction", "directions"}
    optimize_names = inspect.signature(optuna.Study.optimize).parameters.keys() - {"self", "func", "n_trials"}
    for name in kwargs.keys() - study_names - optimize_names:
        near = suggest_name(name, ["direction", "n_trials", "keep_best_trial", *study_names, *optimize_names])
        raise TypeError(
            f"hyperparameter_search was given {name}, which neither optuna.create_study nor optuna.Study.optimize "
            f"takes ({near})."
        )
    args, pruner = trainer.args, kwargs.get("pruner")
    has_evaluations = args.eval_strategy not in (None, IntervalStrategy.NO) or args.eval_minutes is not None
    if pruner is not None and not isinstance(pruner, optuna.pruners.NopPruner) and not has_evaluations:
        raise ValueError(
            f"{type(pruner).__name__} stops trials by their evaluations during training, and eval_strategy='no' gives "
            "none: set eval_strategy='steps' or 'epoch' in the arguments, or pass no pruner."
        )
    trainer.session.search.keeps_best_trial = keep_best_trial
    for_study = {name: value for name, value in kwargs.items() if name in study_names - {"storage"}}
    for_optimize = {name: value for name, value in kwargs.items() if name in optimize_names}
    catch = for_optimize.pop("catch", None)
    catch = TRIAL_FAILURES if catch is None else tuple(catch) if isinstance(catch, Iterable) else (catch,)
    storage, directions = kwargs.get("storage"), [direction] if isinstance(direction, str) else list(direction)
    jobs = count_jobs(trainer.args, for_optimize.pop("n_jobs", 1))
    if jobs != 1:
        reject_multiple_processes(trainer.args, f"n_jobs={kwargs['n_jobs']}")

    def search(run_trial: Callable[[Any], Any]) -> BestRun | list[BestRun]:
        with tempfile.TemporaryDirectory(prefix="littrainer-search-") as folder:
            shared = storage if jobs == 1 else _storage_for_processes(storage, folder)
            try:
                study = optuna.create_study(storage=shared, directions=directions, **for_study)
            except Exception as error:
                if not is_a(error, "storage error"):
                    raise
                reason = getattr(error, "orig", None) or str(error).partition("\n")[0]
                raise ValueError(
                    f"The storage of the study cannot be opened ({reason}): look at storage=. SQLite creates the "
                    "file, but not its folder."
                ) from None
            _check_directions(study, directions)
            current = OptunaSearch(trainer, study, run_trial, catch)
            remaining = n_trials if storage is None or n_trials is None else current.resume(n_trials)
            keywords = {"n_trials": remaining, **for_optimize, "n_jobs": jobs}
            keywords["callbacks"] = [current.write_record, *(for_optimize.get("callbacks") or ())]
            try:
                if jobs == 1:
                    current.optimize(**keywords)
                else:
                    # This thread receives Ctrl-C and interrupts the processes.
                    with ThreadPoolExecutor(1) as thread, TrialProcesses(trainer, study, jobs, folder) as processes:
                        current.run_trial, current.interrupt_processes = processes.run, processes.interrupt
                        thread.submit(current.optimize, **keywords).result()
            finally:
                current.write_record()
            current.finish()
            return current.best_runs()

    return search_with_all(trainer, search)


def _storage_for_processes(storage: Any, folder: str) -> Any:
    """Return the user's storage, or a file instead of a study in memory."""
    from optuna.storages import InMemoryStorage, JournalStorage
    from optuna.storages.journal import JournalFileBackend

    if isinstance(storage, InMemoryStorage):
        raise SearchMistake(
            "n_jobs runs trials in several processes, which cannot share an InMemoryStorage: leave storage out, or "
            "give optuna.storages.JournalStorage or the URL of a database."
        )
    return JournalStorage(JournalFileBackend(os.path.join(folder, "study.log"))) if storage is None else storage


def _check_directions(study: Any, directions: list[str]) -> None:
    study_directions = [direction.name.lower() for direction in study.directions]
    if study_directions != directions:
        wanted, stored = (value[0] if len(value) == 1 else value for value in (directions, study_directions))
        raise ValueError(
            f"direction={wanted!r}, and the study {study.study_name!r} in this storage was made for {stored!r}: "
            f"pass direction={stored!r}, or another study_name."
        )


class OptunaSearch:
    """The trials of a search in a study.

    Parameters:
        catch: errors of a trial after which the search continues.
    """

    def __init__(
        self, trainer: TrainerContext, study: Any, run_trial: Callable[[Any], Any], catch: tuple[type[Exception], ...]
    ):
        self.trainer, self.study, self.run_trial, self.catch = trainer, study, run_trial, catch
        self.interrupt_processes: Callable[[], None] = lambda: None
        # The error that ends the search.
        self.error: Exception | None = None
        self._id = uuid.uuid4().hex
        directions = [direction.name.lower() for direction in study.directions]
        self._record = SearchRecord(trainer.args, "optuna", directions, study.study_name, study.metric_names)
        self._lock = threading.Lock()

    def resume(self, n_trials: int) -> int:
        """Resume an unfinished search of this machine with as many trials, and return the number of remaining trials.

        Interrupted trials are queued again, and the sampler is reseeded.
        """
        host, process, remaining = socket.gethostname(), os.getpid(), n_trials
        for name, note in self.study.user_attrs.items():
            if not name.startswith(NOTE_PREFIX) or not note or (note["host"], note["n_trials"]) != (host, n_trials):
                continue
            if note["pid"] == process or not is_running(note["pid"]):
                self._id = name.removeprefix(NOTE_PREFIX)
                remaining -= self._queue_interrupted_trials()
                logger.warning(
                    f"The study {self.study.study_name!r} holds a search that was interrupted, which continues: "
                    f"{n_trials - remaining} of its {n_trials} trials have ended."
                )
                break
        self.study.set_user_attr(f"{NOTE_PREFIX}{self._id}", {"host": host, "pid": process, "n_trials": n_trials})
        return max(0, remaining)

    def _queue_interrupted_trials(self) -> int:
        """Queue interrupted trials again, and return the number of trials that ended."""
        from optuna.trial import TrialState

        ended = 0
        for trial in self.study.get_trials(deepcopy=False):
            if trial.user_attrs.get(SEARCH) != self._id:
                continue
            if trial.state == TrialState.RUNNING:
                self._queue_again(trial)
                self.study.tell(trial.number, state=TrialState.FAIL)
            # False for an interrupted trial.
            ended += trial.state in (TrialState.COMPLETE, TrialState.PRUNED) or ERROR in trial.user_attrs
        self.study.sampler.reseed_rng()
        return ended

    def _queue_again(self, trial: Any) -> None:
        from optuna.trial import TrialState, create_trial

        drawn = {"params": trial.params, "distributions": trial.distributions, "system_attrs": trial.system_attrs}
        self.study.add_trial(create_trial(state=TrialState.WAITING, **drawn))

    def finish(self) -> None:
        if f"{NOTE_PREFIX}{self._id}" in self.study.user_attrs:
            self.study.set_user_attr(f"{NOTE_PREFIX}{self._id}", None)

    def optimize(self, **keywords: Any) -> None:
        try:
            self.study.optimize(self._objective, catch=self.catch, **keywords)
        except KeyboardInterrupt:
            # An error has interrupted concurrent trials.
            if self.error is None:
                raise
        if self.error is not None:
            raise self.error

    def _objective(self, trial: Any) -> Any:
        trial.set_user_attr(SEARCH, self._id)
        try:
            objective = self.run_trial(trial)
            values = objective if isinstance(objective, list) else [objective]
            if len(values) != len(self.study.directions):
                raise SearchMistake(
                    f"compute_objective returned {len(values)} numbers ({objective!r}), and direction names "
                    f"{len(self.study.directions)}: give as many directions as there are objectives."
                )
            if any(map(math.isnan, values)):
                trial.set_user_attr(ERROR, "the objective is nan")
            return objective
        except KeyboardInterrupt:
            # A resumed search repeats the trial.
            self._queue_again(self.study._storage.get_trial(trial._trial_id))
            raise
        except Exception as error:
            if is_a(error, "pruned trial"):
                raise
            trial.set_user_attr(ERROR, format_error(error))
            # Optuna prints the traceback.
            shorten_tracebacks(error, error.__traceback__)
            if not is_trial_failure(error, self.catch):
                self.error = self.error or error
                self.study.stop()
                self.interrupt_processes()
            raise
        finally:
            # After an early failure `hp_name` may miss a parameter.
            with contextlib.suppress(Exception):
                if not trial.params:
                    # Parameters drawn in another process are in the storage only; Optuna's line shows these.
                    trial._cached_frozen_trial = self.study._storage.get_trial(trial._trial_id)
                folder = self.trainer._get_output_dir(trial)
                if os.path.isdir(folder):
                    trial.set_user_attr(FOLDER, folder)

    def write_record(self, *_: Any) -> None:
        with self._lock:
            self._record.update(self._collect_trial_records())
            if self.trainer.session.search.keeps_best_trial:
                delete_models_of_other_trials(self._record.search)

    def _collect_trial_records(self) -> list[TrialRecord]:
        trials = self.study.get_trials(deepcopy=False)
        return [self._make_trial_record(trial) for trial in trials if trial.state.name in STATES]

    def _make_trial_record(self, trial: Any) -> TrialRecord:
        record = TrialRecord(str(trial.number), STATES[trial.state.name], parameters=dict(trial.params))
        record.folder = trial.user_attrs.get(FOLDER)
        record.distributions = {name: describe_distribution(drawn) for name, drawn in trial.distributions.items()}
        record.intermediate = sorted(trial.intermediate_values.items())
        record.seconds = None if trial.duration is None else trial.duration.total_seconds()
        if record.state == COMPLETE:
            record.objective = _get_objective(trial)
        elif record.state == FAILED:
            record.error = trial.user_attrs.get(ERROR, INTERRUPTED if SEARCH in trial.user_attrs else None)
        return record

    def best_runs(self) -> BestRun | list[BestRun]:
        trials = self._collect_trial_records()
        if not any(trial.state == COMPLETE for trial in trials):
            raise make_no_trial_error(trials, "With catch=() a search ends at the first failure, with its traceback.")
        has_several = len(self.study.directions) > 1
        best = self.study.best_trials if has_several else [self.study.best_trial]
        runs = [BestRun(str(trial.number), _get_objective(trial), trial.params) for trial in best]
        return runs if has_several else runs[0]


def describe_distribution(distribution: Any) -> dict[str, Any]:
    """Return a distribution in the format of `TrialRecord.distributions`."""
    if hasattr(distribution, "choices"):
        return {"kind": "categorical", "choices": list(distribution.choices)}
    kind = "int" if type(distribution).__name__.startswith("Int") else "float"
    limits = {name: getattr(distribution, name) for name in ("low", "high", "log", "step")}
    return {"kind": kind, **limits}


def _get_objective(trial: Any) -> Any:
    return trial.values[0] if len(trial.values) == 1 else list(trial.values)
