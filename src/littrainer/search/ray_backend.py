"""A search on Ray Tune: each trial in a process that Ray starts, on this machine or on others.

Ray ends and pauses a trial where it waits in `ray.tune.report`, by a SystemExit there. A report is therefore made when
all that is due at its optimizer step has been done, so that a checkpoint handed to Ray goes on exactly.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from littrainer.arguments.choices import IntervalStrategy
from littrainer.checkpoint.layout import PREFIX_CHECKPOINT_DIR
from littrainer.redirection import redirect
from littrainer.search.distributed_search import refuse_several_processes
from littrainer.search.parameters import asked
from littrainer.search.record import (
    COMPLETE,
    FAILED,
    PRUNED,
    RUNNING,
    BestRun,
    SearchRecord,
    TrialRecord,
    error_in_a_line,
    of_ray,
)
from littrainer.search.trainer_pickle import packed, unpacked
from littrainer.search.trial import fails_trial_only, run_trial

# The prefix of the names of an experiment and of its trials.
NAME = "hyperparameter_search"
# Entries of each result, with the evaluation's metrics.
OBJECTIVE, STEP, LAST_STEP = "objective", "step", "max_steps"
# By the names of their classes: these need no evaluation while training; end trials and never pause one.
NEEDS_NO_EVALUATION = "FIFOScheduler"
NEVER_PAUSES = (NEEDS_NO_EVALUATION, "AsyncHyperBandScheduler")
# How long Ray waits for the training of a trial that it has ended, which closes the runs of trackers; its own limit of
# two seconds is short.
THREAD_TIMEOUT, SECONDS_FOR_AN_ENDED_TRAINING = "TUNE_FUNCTION_THREAD_TIMEOUT_S", "60"
# Logs every checkpoint that is handed to Ray.
LOGS_CHECKPOINTS = "ray.train._internal.storage"
DIED = (
    "its process died without an error, most often as memory ran out (let fewer trials run at once, with "
    "max_concurrent_trials); Ray's logs of its worker may say more"
)


def run_hp_search_ray(trainer: Any, n_trials: int, direction: str, **kwargs: Any) -> BestRun:
    """Search on Ray Tune.

    Parameters:
        n_trials: samples of the space; a `grid_search` in it is gone through in each of them.
        direction: `minimize` or `maximize`.
        kwargs: keywords of `ray.tune.run`. By default a trial gets one CPU, and a GPU if there is one, failed trials
            do not end the search (`raise_on_failed_trial=False`), and a `CLIReporter` shows how trials stand. The
            environment variable `RAY_SCOPE` says what of a trial's objectives counts, `last` by default.

    Returns:
        the best of the trials that have not failed, with Ray's `ExperimentAnalysis` as `run_summary`.

    Raises:
        ValueError, TypeError: an unknown keyword, or trials would get more than one GPU.
        RuntimeError: the scheduler needs evaluations while training and there are none; no trial was completed.
        SearchMistake, or what is no failure of hyperparameters: a trial shows that the script is wrong, or several
            processes search together.
    """
    import ray.tune

    args = trainer.args
    refuse_several_processes(args, 'backend="ray"')
    space = asked(trainer.hp_space, None)
    scheduler = kwargs.get("scheduler")
    kind = type(scheduler).__name__
    evaluates = args.do_eval and args.eval_strategy != IntervalStrategy.NO
    if scheduler is not None and kind != NEEDS_NO_EVALUATION and not evaluates:
        raise RuntimeError(
            f"{kind} needs evaluations while trials train, and eval_strategy='no' gives none: set "
            "eval_strategy='steps' or 'epoch' in the arguments, or pass no scheduler."
        )
    kwargs.setdefault("resources_per_trial", {"cpu": 1, **({"gpu": 1} if args.n_gpu > 0 else {})})
    gpus = kwargs["resources_per_trial"].get("gpu", 0) if isinstance(kwargs["resources_per_trial"], dict) else 0
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
    trials = RayTrials(SearchRecord(trainer, "ray", [direction]), trainer.hp_name, space)
    kwargs["callbacks"] = [*(kwargs.get("callbacks") or []), trials.callback()]
    pauses = scheduler is not None and kind not in NEVER_PAUSES
    trainable = ray.tune.with_parameters(
        train_trial,
        packed_trainer=packed(trainer),
        path=list(sys.path),
        folder=os.getcwd(),
        is_redirected=redirect.is_installed(),
        checkpoints_each_report=pauses,
    )
    trainable.__name__ = NAME
    try:
        analysis = ray.tune.run(trainable, config=space, num_samples=n_trials, **kwargs)
    except BaseException:
        trials.leave_unfinished()
        if trials.mistake is not None:
            raise trials.mistake from None
        raise
    trials.leave_unfinished()
    # A trial that has failed after a report is none to go on with.
    compared = copy.copy(analysis)
    compared.trials = [trial for trial in analysis.trials if trial.status != "ERROR"]
    best = compared.get_best_trial(OBJECTIVE, direction[:3], os.environ.get("RAY_SCOPE", "last"))
    if best is None or OBJECTIVE not in (best.last_result or {}):
        errors = [trial.error for trial in trials.records.values() if trial.error is not None]
        why = f"; the first failed with {errors[0]}." if errors else "."
        raise RuntimeError(f"None of the {len(analysis.trials)} trials ended with an objective{why}")
    if best.is_finished():
        # Also if the scheduler stopped it.
        trials.keep(best, COMPLETE)
    return BestRun(best.trial_id, best.last_result[OBJECTIVE], best.config, analysis)


class RayTrials:
    """What becomes of the trials of a search: its record, and the error that ends it.

    Attributes:
        mistake: the error that ended the search, if the script is wrong.
        records: id of a trial -> what is recorded of it.
    """

    def __init__(self, record: SearchRecord, hp_name: Callable[[Any], str] | None, space: dict[str, Any]) -> None:
        self.mistake: BaseException | None = None
        self._record, self._hp_name = record, hp_name
        self._drawn_from = {name: found for name, domain in space.items() if (found := of_ray(domain))}
        self.records: dict[str, TrialRecord] = {}

    def callback(self) -> Any:
        """Return the callback by which Ray reports its trials."""
        from ray.tune import Callback

        keep, end_with_error = self.keep, self.end_with_error

        class KeepsRecord(Callback):
            def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
                keep(trial, RUNNING)

            def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
                if OBJECTIVE in result:
                    kept = keep(trial, RUNNING)
                    kept.intermediate.append((result.get(STEP, iteration), result[OBJECTIVE]))

            def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
                result = trial.last_result or {}
                keep(trial, COMPLETE if result.get(STEP, 0) >= result.get(LAST_STEP, 0) else PRUNED)

            def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
                end_with_error(trial)

        return KeepsRecord()

    def keep(self, trial: Any, state: str) -> TrialRecord:
        """Record how a trial of Ray's stands."""
        result = trial.last_result or {}
        if trial.trial_id not in self.records:
            name = f"run-{trial.trial_id}"
            # An hp_name that fails does so in the trial's process too, which ends the search.
            with contextlib.suppress(Exception):
                name = name if self._hp_name is None else str(self._hp_name(trial.config))
            folder = str(self._record.path.parent / name)
            self.records[trial.trial_id] = TrialRecord(trial.trial_id, state, folder=folder)
            self._record.search.name = trial.experiment_dir_name
        kept = self.records[trial.trial_id]
        kept.state, kept.objective, kept.seconds = state, result.get(OBJECTIVE), result.get("time_total_s")
        kept.parameters, kept.distributions = dict(trial.config), self._drawn_from
        self._record.update(list(self.records.values()))
        return kept

    def end_with_error(self, trial: Any) -> None:
        """Record that a trial has failed.

        Raises:
            Exception: its error, if that is none that hyperparameters bring about; it ends the search.
        """
        from ray import cloudpickle
        from ray.exceptions import RayTaskError

        error: Any = None
        # The copy next to Ray's logs; the one in the storage is brought there later.
        with contextlib.suppress(Exception):
            error = cloudpickle.loads(Path(str(trial.pickled_error_file)).read_bytes())
        cause = error.cause if isinstance(error, RayTaskError) else None
        self.keep(trial, FAILED).error = DIED if cause is None else error_in_a_line(cause)
        self._record.update(list(self.records.values()))
        if cause is not None and not fails_trial_only(cause):
            self.mistake = error.as_instanceof_cause()
            raise self.mistake

    def leave_unfinished(self) -> None:
        """Note that the trials that still run have no end, since the search is over."""
        for trial in self.records.values():
            if trial.state == RUNNING:
                trial.state, trial.error = FAILED, "it was interrupted"
        self._record.update(list(self.records.values()))


# ---- In the process that Ray has started for a trial -----------------------------------------------------------------

# Whether the scheduler may pause the trial of this process at any report.
_saves_each_report = False


def train_trial(
    config: dict[str, Any],
    packed_trainer: bytes,
    path: list[str],
    folder: str,
    is_redirected: bool,
    checkpoints_each_report: bool,
) -> None:
    """Carry out one trial; Ray calls this in the trial's process.

    Parameters:
        config: the hyperparameters that Ray has drawn.
        packed_trainer: the Trainer as `trainer_pickle.packed` has it.
        path, folder: `sys.path` and the working folder of the process that searches.
        is_redirected: whether names of transformers are answered by ours there.
        checkpoints_each_report: whether the scheduler may pause a trial at any report.
    """
    import ray.tune

    logging.getLogger(LOGS_CHECKPOINTS).setLevel(logging.WARNING)
    os.environ.setdefault(THREAD_TIMEOUT, SECONDS_FOR_AN_ENDED_TRAINING)
    sys.path.extend(entry for entry in path if entry not in sys.path)
    # Paths of the script, and of its arguments, are relative to the folder in which the search was started.
    if "RAY_CHDIR_TO_TRIAL_DIR" not in os.environ and os.path.isdir(folder):
        os.chdir(folder)
    if is_redirected:
        redirect.install()
    trainer = unpacked(packed_trainer)
    global _saves_each_report
    _saves_each_report = checkpoints_each_report
    # Ray shows this process the GPU that it has for the trial, or none.
    for name in ("device", "_n_gpu"):
        vars(trainer.args).pop(name, None)
    # A trial that was paused goes on as if it had not been.
    trainer.args.restore_callback_states_from_checkpoint = True
    checkpoint = ray.tune.get_checkpoint()
    if checkpoint is None:
        run_trial(trainer, config, evaluated_at_end=functools.partial(report_to_ray, trainer))
        return
    with checkpoint.as_directory() as handed_over:
        found = next(Path(handed_over).glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
        run_trial(trainer, config, resume_from_checkpoint=str(found))


def report_to_ray(trainer: Any, metrics: dict[str, Any]) -> None:
    """Hand an evaluation to Ray: while training, as soon as what is due at this optimizer step has been done."""
    state = trainer.state
    result = {**metrics, OBJECTIVE: trainer.objective, STEP: state.global_step, LAST_STEP: state.max_steps}
    if trainer.is_in_train and trainer.training_run is not None:
        saves = trainer.control.should_save or _saves_each_report
        trainer.training_run.step.when_done = functools.partial(_hand_over, trainer, result, saves)
    else:
        _hand_over(trainer, result, saves=False)


def _hand_over(trainer: Any, result: dict[str, Any], saves: bool) -> None:
    import ray.tune

    working_folder = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if saves:
            trainer._tune_save_checkpoint(checkpoint_dir=folder)
            checkpoint = ray.tune.Checkpoint.from_directory(folder)
        try:
            ray.tune.report(result, checkpoint=checkpoint)
        except SystemExit:
            # Ray ends the trial here, and has gone on to the folder of the next one; trackers close this trial's run.
            os.chdir(working_folder)
            trainer.control = trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
            raise
