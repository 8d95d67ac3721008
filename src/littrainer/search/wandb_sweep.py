"""A search as a sweep of Weights & Biases: its server draws, and an agent in this process runs the trials."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Mapping
from typing import Any

from littrainer.arguments.did_you_mean import suggest_name
from littrainer.callbacks.trainer_context import TrainerContext
from littrainer.search.distributed_search import TrialRunner, search_with_all
from littrainer.search.parameters import SearchMistake, call_space
from littrainer.search.record import (
    COMPLETE,
    FAILED,
    PRUNED,
    RUNNING,
    BestRun,
    SearchRecord,
    TrialRecord,
    find_best_trials,
    format_error,
    make_no_trial_error,
)
from littrainer.search.trial import is_trial_failure
from littrainer.tracking.wandb import WandbCallback

logger = logging.getLogger(__name__)

KEYWORDS = ("sweep_id", "project", "entity", "name", "metric")


class SweepTrial(dict[str, Any]):
    """The parameters that a sweep has drawn for its run `run_id`."""

    def __init__(self, parameters: Mapping[str, Any], run_id: str):
        super().__init__(parameters)
        self.run_id = run_id
        # (optimizer step, objective)
        self.reported: list[tuple[int, float]] = []


def run_hp_search_wandb(trainer: TrainerContext, n_trials: int, direction: str, **kwargs: Any) -> BestRun:
    """Search with a sweep.

    Parameters:
        n_trials: runs of this agent; with a `sweep_id` other agents may run more.
        kwargs: `sweep_id` of an existing sweep, or the `name` of a new sweep; its `project` and `entity`; the
            optimized `metric` under its name in logs, such as "eval/loss", or "objective" for `compute_objective`.

    Returns:
        the best of this agent's trials, with the sweep's id as `run_summary`.
    """
    for name in kwargs:
        if name not in KEYWORDS:
            raise SearchMistake(f"A search with backend='wandb' takes no {name!r}: {suggest_name(name, KEYWORDS)}")
    added = None
    if not any(isinstance(callback, WandbCallback) for callback in trainer.callback_handler.callbacks):
        trainer.add_callback(added := WandbCallback())
    try:
        return search_with_all(trainer, lambda run_trial: _Sweep(trainer, run_trial, direction, **kwargs).run(n_trials))
    finally:
        if added is not None:
            trainer.remove_callback(added)


class _Sweep:
    """A sweep in the first process."""

    def __init__(
        self,
        trainer: TrainerContext,
        run_trial: TrialRunner,
        direction: str,
        sweep_id: str | None = None,
        metric: str | None = None,
        name: str | None = None,
        **owner: Any,
    ):
        self.trainer, self.run_trial, self.direction = trainer, run_trial, direction
        self.metric, self.owner = metric or "eval/loss", {"entity": None, "project": None, **owner}
        self.parameters: dict[str, Any] = {}
        self.trials: list[TrialRecord] = []
        self.error: BaseException | None = None
        if not sweep_id:
            configuration = self._make_configuration(name)
            self.parameters = dict(configuration["parameters"])
            sweep_id = _wandb().sweep(configuration, **self.owner)
        self.id = sweep_id
        logger.info("The sweep of Weights & Biases is %s.", sweep_id)
        self.record = SearchRecord(trainer.args, "wandb", [direction], str(sweep_id))

    def _make_configuration(self, name: str | None) -> dict[str, Any]:
        configuration = call_space(self.trainer.hp_space, None)
        parameters = configuration.get("parameters")
        if not isinstance(parameters, Mapping) or not parameters:
            raise SearchMistake(
                "hp_space has to return the configuration of a sweep, with the space under 'parameters': "
                '{"method": "random", "parameters": {"learning_rate": {"min": 1e-6, "max": 1e-4}}}; it returned '
                f"{configuration!r}."
            )
        if "early_terminate" in configuration and self.trainer.args.world_size > 1:
            raise SearchMistake(
                "hp_space gives early_terminate, by which the sweep stops trials in the first process alone, and "
                'several train them. Leave it out, or search with backend="optuna" and a pruner.'
            )
        metric = {**configuration.get("metric", {}), "goal": self.direction, "name": self.metric}
        return {"method": "random", **configuration, "metric": metric, **({"name": name} if name else {})}

    def run(self, n_trials: int) -> BestRun:
        _wandb().agent(self.id, function=self._run_trial, count=n_trials, **self.owner)
        if self.error is not None:
            raise self.error
        best = find_best_trials(self.trials, [self.direction])
        if not best:
            raise make_no_trial_error(self.trials)
        objective: Any = best[0].objective
        return BestRun(best[0].id, objective, best[0].parameters, self.id)

    def _run_trial(self) -> None:
        """Train a trial; the agent calls this in another thread for each run."""
        if self.error is not None:
            # The agent continues after an error.
            raise self.error
        run = _wandb().run or _wandb().init()
        names = self.parameters or [name for name in dict(run.config) if not name.startswith("_")]
        trial = SweepTrial({name: value for name, value in dict(run.config).items() if name in names}, run.id)
        # As in transformers.
        run.config.update({"assignments": {}, "metric": self.metric}, allow_val_change=True)
        folder = self.trainer._get_output_dir(trial=trial)
        record = TrialRecord(run.id, RUNNING, None, dict(trial), intermediate=trial.reported, folder=folder)
        self.trials.append(record)
        start = time.monotonic()
        try:
            record.objective = self.run_trial(trial)
            record.state = COMPLETE
        except BaseException as error:
            # Such an exception interrupts a run that the server has stopped.
            is_stopped = type(error) is Exception and not error.args
            record.state, record.error = (PRUNED, None) if is_stopped else (FAILED, format_error(error))
            if is_stopped:
                raise
            if not is_trial_failure(error):
                self.error = error
                raise
            _wandb().finish(exit_code=1)
            return
        finally:
            record.seconds = time.monotonic() - start
            self.record.update(self.trials)
        run = _wandb().run
        run.log({"objective": record.objective})
        logged = sorted(name for name in dict(run.summary) if not name.startswith("_"))
        if self.metric not in logged:
            # As in transformers.
            logger.warning("The sweep optimizes metric=%r, which no run logs. They log %s.", self.metric, logged)


def _wandb() -> Any:
    return importlib.import_module("wandb")
