"""A search on Ray Tune: each trial runs in a process that Ray starts.

Ray ends and pauses a trial by a SystemExit in `ray.tune.report`, which is therefore called last at an optimizer step.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray.tune

from littrainer.arguments.choices import IntervalStrategy
from littrainer.callbacks.trainer_context import TrainerContext
from littrainer.checkpoint.layout import PREFIX_CHECKPOINT_DIR
from littrainer.redirection import redirect
from littrainer.search.distributed_search import reject_multiple_processes
from littrainer.search.parameters import call_space
from littrainer.search.record import (
    COMPLETE,
    FAILED,
    INTERRUPTED,
    PRUNED,
    RUNNING,
    BestRun,
    SearchRecord,
    TrialRecord,
    format_error,
    make_no_trial_error,
)
from littrainer.search.trainer_pickle import pack, unpack
from littrainer.search.trial import is_trial_failure, run_trial

NAME = "hyperparameter_search"
# Entries of a result, in addition to the evaluation's metrics.
OBJECTIVE, STEP, LAST_STEP = "objective", "step", "max_steps"
# FIFO needs no evaluation during training.
FIFO_SCHEDULER = "FIFOScheduler"
NON_PAUSING_SCHEDULERS = (FIFO_SCHEDULER, "AsyncHyperBandScheduler")
# Ray's default of two seconds is too short to close the runs of trackers.
THREAD_TIMEOUT, MAX_SHUTDOWN_S = "TUNE_FUNCTION_THREAD_TIMEOUT_S", "60"
# Logs every checkpoint that Ray receives.
CHECKPOINT_LOGGER = "ray.train._internal.storage"
PROCESS_DIED_MESSAGE = (
    "its process died without an error, most often as memory ran out (let fewer trials run at once, with "
    "max_concurrent_trials); Ray's logs of its worker may say more"
)


def search_with_ray(trainer: TrainerContext, n_trials: int, direction: str, **kwargs: Any) -> BestRun:
    """Search on Ray Tune.

    Parameters:
        n_trials: samples of the space; each sample takes all values of a `grid_search`.
        kwargs: keywords of `ray.tune.run`. By default a trial gets a CPU and, if available, a GPU, failed trials
            do not end the search (`raise_on_failed_trial=False`), and a `CLIReporter` shows the trials. The
            variable `RAY_SCOPE` selects the objective of a trial, `last` by default.

    Returns:
        the best trial that has not failed, with Ray's `ExperimentAnalysis` as `run_summary`.
    """
    args, scheduler = trainer.args, kwargs.get("scheduler")
    if kwargs.pop("keep_best_trial", False):
        raise ValueError(
            "keep_best_trial needs backend='optuna'. With Ray set save_strategy, and keep the folder of the best trial."
        )
    reject_multiple_processes(args, 'backend="ray"')
    space = call_space(trainer.hp_space, None)
    kind = FIFO_SCHEDULER if scheduler is None else type(scheduler).__name__
    if kind != FIFO_SCHEDULER and not (args.do_eval and args.eval_strategy != IntervalStrategy.NO):
        raise RuntimeError(
            f"{kind} needs evaluations while trials train, and eval_strategy='no' gives none: set "
            "eval_strategy='steps' or 'epoch' in the arguments, or pass no scheduler."
        )
    resources = kwargs.setdefault("resources_per_trial", {"cpu": 1, **({"gpu": 1} if args.n_gpu > 0 else {})})
    gpus = resources.get("gpu", 0) if isinstance(resources, dict) else 0
    if gpus > 1:
        raise ValueError(
            f"resources_per_trial gives {gpus} GPUs to each trial, and a trial of a Ray search trains in one process "
            "on one GPU. Give it at most 1, or search with backend='optuna' in several processes."
        )
    kwargs.setdefault("raise_on_failed_trial", False)
    kwargs.setdefault("progress_reporter", ray.tune.CLIReporter(metric_columns=[OBJECTIVE]))
    if scheduler is not None and getattr(scheduler, "_metric", None) is None and "search_alg" not in kwargs:
        kwargs.setdefault("metric", OBJECTIVE)
        kwargs.setdefault("mode", direction[:3])
    trials = RayTrials(SearchRecord(args, "ray", [direction]), trainer.hp_name, space)
    kwargs["callbacks"] = [*(kwargs.get("callbacks") or []), trials]
    trainable = ray.tune.with_parameters(
        train_trial,
        packed_trainer=pack(trainer),
        path=list(sys.path),
        folder=os.getcwd(),
        is_redirected=redirect.is_installed(),
        checkpoints_each_report=kind not in NON_PAUSING_SCHEDULERS,
    )
    trainable.__name__ = NAME
    try:
        analysis = ray.tune.run(trainable, config=space, num_samples=n_trials, **kwargs)
    except BaseException:
        if trials.mistake is not None:
            raise trials.mistake from None
        raise
    finally:
        trials.end()
    # Ignore a trial that failed after a report.
    compared = copy.copy(analysis)
    compared.trials = [trial for trial in analysis.trials if trial.status != "ERROR"]
    best = compared.get_best_trial(OBJECTIVE, direction[:3], os.environ.get("RAY_SCOPE", "last"))
    if best is None or OBJECTIVE not in (best.last_result or {}):
        raise make_no_trial_error(list(trials.records.values()))
    if best.is_finished():
        # Even if the scheduler stopped it.
        trials.record_state(best, COMPLETE)
    return BestRun(best.trial_id, best.last_result[OBJECTIVE], best.config, analysis)


def describe_domain(domain: Any) -> dict[str, Any] | None:
    """Return an entry of Ray Tune's space in the format of `TrialRecord.distributions`, if that can express it."""
    choices = getattr(domain, "categories", None)
    if isinstance(domain, dict) and list(domain) == ["grid_search"]:
        choices = domain["grid_search"]
    if choices is not None:
        return {"kind": "categorical", "choices": list(choices)}
    # Strings have `lower` too.
    if not (hasattr(domain, "get_sampler") and hasattr(domain, "lower") and hasattr(domain, "upper")):
        return None
    low, high, sampler = domain.lower, domain.upper, domain.get_sampler()
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    # A quantized sampler wraps the sampler of the distribution.
    step = getattr(sampler, "q", None)
    is_log = "Log" in type(getattr(sampler, "sampler", None) or sampler).__name__
    is_integer = type(domain).__name__ == "Integer"
    if is_integer and not step:
        # Ray excludes the upper end of integers, unless it rounds them to multiples.
        high, step = high - 1, 1
    return {"kind": "int" if is_integer else "float", "low": low, "high": high, "log": is_log, "step": step}


class RayTrials(ray.tune.Callback):
    """Recorder of a search's trials, and of the error that ends the search (`mistake`)."""

    def __init__(self, record: SearchRecord, hp_name: Callable[[Any], str] | None, space: dict[str, Any]) -> None:
        self.mistake: BaseException | None = None
        self._record, self._hp_name = record, hp_name
        descriptions = {name: describe_domain(domain) for name, domain in space.items()}
        self._distributions = {name: described for name, described in descriptions.items() if described is not None}
        # By id.
        self.records: dict[str, TrialRecord] = {}

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.record_state(trial, RUNNING)

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
        if OBJECTIVE in result:
            record = self.record_state(trial, RUNNING)
            record.intermediate.append((result.get(STEP, iteration), result[OBJECTIVE]))

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """Record the end of a trial, which is pruned if it stopped before its last step."""
        result = trial.last_result or {}
        self.record_state(trial, COMPLETE if result.get(STEP, 0) >= result.get(LAST_STEP, 0) else PRUNED)

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """Record a failure; raise an error that hyperparameters cannot have caused, to end the search."""
        error: Any = None
        # Ray copies this file to the storage later.
        with contextlib.suppress(Exception):
            error = ray.cloudpickle.loads(Path(str(trial.pickled_error_file)).read_bytes())
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else None
        self.record_state(trial, FAILED, PROCESS_DIED_MESSAGE if cause is None else format_error(cause))
        if cause is not None and not is_trial_failure(cause):
            self.mistake = error.as_instanceof_cause()
            raise self.mistake

    def record_state(self, trial: Any, state: str, error: str | None = None) -> TrialRecord:
        if trial.trial_id not in self.records:
            name = f"run-{trial.trial_id}"
            # A failing hp_name fails in the trial's process too, which ends the search.
            with contextlib.suppress(Exception):
                name = name if self._hp_name is None else str(self._hp_name(trial.config))
            folder = str(self._record.path.parent / name)
            self.records[trial.trial_id] = TrialRecord(trial.trial_id, state, folder=folder)
            self._record.search.name = trial.experiment_dir_name
        record, result = self.records[trial.trial_id], trial.last_result or {}
        record.state, record.error = state, error
        record.objective, record.seconds = result.get(OBJECTIVE), result.get("time_total_s")
        record.parameters, record.distributions = dict(trial.config), self._distributions
        self._record.update(list(self.records.values()))
        return record

    def end(self) -> None:
        """Record running trials as interrupted."""
        for record in self.records.values():
            if record.state == RUNNING:
                record.state, record.error = FAILED, INTERRUPTED
        self._record.update(list(self.records.values()))


# ---- In the process that Ray has started for a trial -----------------------------------------------------------------


def train_trial(
    config: dict[str, Any],
    packed_trainer: bytes,
    path: list[str],
    folder: str,
    is_redirected: bool,
    checkpoints_each_report: bool,
) -> None:
    """Run a trial in its process; Ray calls this.

    Parameters:
        path, folder, is_redirected: `sys.path`, working folder and redirection of the process that started the search.
        checkpoints_each_report: whether the scheduler may pause a trial at any report.
    """
    logging.getLogger(CHECKPOINT_LOGGER).setLevel(logging.WARNING)
    os.environ.setdefault(THREAD_TIMEOUT, MAX_SHUTDOWN_S)
    sys.path.extend(entry for entry in path if entry not in sys.path)
    # The script's paths are relative to the folder in which the search was started.
    if "RAY_CHDIR_TO_TRIAL_DIR" not in os.environ and os.path.isdir(folder):
        os.chdir(folder)
    if is_redirected:
        redirect.install()
    trainer = unpack(packed_trainer)
    trainer.session.search.saves_each_report = checkpoints_each_report
    # Ray has assigned a GPU, or none.
    for name in ("device", "_n_gpu"):
        vars(trainer.args).pop(name, None)
    # A paused trial must resume exactly.
    trainer.args.restore_callback_states_from_checkpoint = True
    checkpoint = ray.tune.get_checkpoint()
    if checkpoint is None:
        run_trial(trainer, config, on_last_evaluation=functools.partial(report_to_ray, trainer))
        return
    with checkpoint.as_directory() as checkpoint_folder:
        run_dir = next(Path(checkpoint_folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
        run_trial(trainer, config, resume_from_checkpoint=str(run_dir))


def report_to_ray(
    trainer: TrainerContext, metrics: dict[str, Any], save_checkpoint: Callable[[str], None] | None = None
) -> None:
    """Report an evaluation to Ray, during training after all other actions at an optimizer step.

    Parameters:
        save_checkpoint: takes a folder; None at the end of a trial, which is not resumed.
    """
    state, search = trainer.state, trainer.session.search
    result = {**metrics, OBJECTIVE: search.objective, STEP: state.global_step, LAST_STEP: state.max_steps}
    if trainer.is_in_train and trainer.session.run is not None:
        save = save_checkpoint if trainer.control.should_save or search.saves_each_report else None
        trainer.session.run.step.on_step_done = functools.partial(_report_result, trainer, result, save)
    else:
        _report_result(trainer, result, None)


def _report_result(trainer: TrainerContext, result: dict[str, Any], save: Callable[[str], None] | None) -> None:
    working_folder = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if save is not None:
            save(folder)
            checkpoint = ray.tune.Checkpoint.from_directory(folder)
        try:
            ray.tune.report(result, checkpoint=checkpoint)
        except SystemExit:
            # Ray has changed the working folder; let trackers close the trial's run.
            os.chdir(working_folder)
            trainer.control = trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
            raise
