"""A search that is a sweep of Weights & Biases: its server draws, and an agent in this process trains the trials."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Mapping
from typing import Any

from littrainer.arguments.did_you_mean import suggestion
from littrainer.distributed.agreement import LostProcess
from littrainer.search.distributed_search import RunsTrial, searched_by_all
from littrainer.search.parameters import SearchMistake, asked
from littrainer.search.record import (
    COMPLETE,
    FAILED,
    PRUNED,
    RUNNING,
    BestRun,
    SearchRecord,
    TrialRecord,
    best_of,
    error_in_a_line,
)
from littrainer.search.trial import fails_trial_only
from littrainer.tracking.wandb import WandbCallback

logger = logging.getLogger(__name__)

KEYWORDS = ("sweep_id", "project", "entity", "name", "metric")


class SweepTrial(dict[str, Any]):
    """The parameters that a sweep has drawn for one of its runs, which Weights & Biases calls `run_id`."""

    def __init__(self, parameters: Mapping[str, Any], run_id: str):
        super().__init__(parameters)
        self.run_id = run_id
        # Optimizer step and objective of each evaluation in training.
        self.reported: list[tuple[int, float]] = []

    def __reduce__(self) -> Any:
        return SweepTrial, (dict(self), self.run_id)


def run_hp_search_wandb(trainer: Any, n_trials: int, direction: str, **kwargs: Any) -> BestRun:
    """Search with a sweep.

    Parameters:
        n_trials: runs that this agent takes; with a `sweep_id` other agents may take more.
        direction: "minimize" or "maximize".
        kwargs: `sweep_id` of an existing sweep, whose space counts; else a sweep is made, with this `name`. `project`
            and `entity` it belongs to. `metric`, as runs log it, that the sweep optimizes: "eval/loss", or "objective"
            for what `compute_objective` returns.

    Returns:
        the best of this agent's trials, with the sweep's id as `run_summary`.

    Raises:
        SearchMistake: a keyword is unknown, or the space is no sweep configuration.
        RuntimeError: no trial is complete.
    """
    for name in kwargs:
        if name not in KEYWORDS:
            raise SearchMistake(f"A search with backend='wandb' takes no {name!r}: {suggestion(name, KEYWORDS)}")
    added = not any(isinstance(callback, WandbCallback) for callback in trainer.callback_handler.callbacks)
    if added:
        trainer.add_callback(callback := WandbCallback())
    try:
        return searched_by_all(trainer, lambda run: _Sweep(trainer, run, direction, kwargs).search(n_trials))
    finally:
        if added:
            trainer.remove_callback(callback)


class _Sweep:
    """A sweep as its first process carries it out; `options` are those of `KEYWORDS` that are given."""

    def __init__(self, trainer: Any, run_trial: RunsTrial, direction: str, options: dict[str, Any]):
        self.trainer, self.run_trial = trainer, run_trial
        self.direction, self.options = direction, options
        self.metric: str = options.get("metric") or "eval/loss"
        self.parameters: dict[str, Any] = {}
        self.trials: list[TrialRecord] = []
        # What ends the search.
        self.error: BaseException | None = None

    def search(self, n_trials: int) -> BestRun:
        """Run the agent until it has had so many trials."""
        place = {name: self.options.get(name) for name in ("entity", "project")}
        sweep_id = self.options.get("sweep_id")
        if not sweep_id:
            configuration = self._configuration()
            self.parameters = dict(configuration["parameters"])
            sweep_id = _wandb().sweep(configuration, **place)
        logger.info("The sweep of Weights & Biases is %s.", sweep_id)
        self.record = SearchRecord(self.trainer, "wandb", [self.direction], str(sweep_id))
        _wandb().agent(sweep_id, function=self._run_once, count=n_trials, **place)
        if self.error is not None:
            raise self.error
        best = best_of(self.trials, [self.direction])
        if not best:
            failures = [trial.error for trial in self.trials if trial.error is not None]
            why = f"; the first failure: {failures[0]}." if failures else "."
            raise RuntimeError(f"No trial of the sweep {sweep_id} is complete{why}")
        objective = best[0].objective
        assert objective is not None
        return BestRun(best[0].id, objective, best[0].parameters, sweep_id)

    def _configuration(self) -> dict[str, Any]:
        configuration = asked(self.trainer.hp_space, None)
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
        name = {"name": self.options["name"]} if self.options.get("name") else {}
        return {"method": "random", **configuration, "metric": metric, **name}

    def _run_once(self) -> None:
        """Train one trial; the agent calls this in another thread, for each run that the server gives it."""
        if self.error is not None:
            # The agent goes on after an error.
            raise self.error
        run = _wandb().run or _wandb().init()
        drawn = {name: value for name, value in dict(run.config).items() if not name.startswith("_")}
        own = {name: value for name, value in drawn.items() if name in self.parameters or not self.parameters}
        trial = SweepTrial(own, run.id)
        # As in transformers.
        run.config.update({"assignments": {}, "metric": self.metric}, allow_val_change=True)
        folder = self.trainer._get_output_dir(trial=trial)
        entry = TrialRecord(run.id, RUNNING, None, own, intermediate=trial.reported, folder=folder)
        self.trials.append(entry)
        start = time.monotonic()
        try:
            entry.objective = self.run_trial(trial)
            entry.state = COMPLETE
        except BaseException as error:
            entry.state, entry.error = FAILED, error_in_a_line(error)
            if type(error) is Exception and not error.args:
                # So the agent interrupts a run that the server has stopped.
                entry.state, entry.error = PRUNED, None
                raise
            if isinstance(error, LostProcess) or not fails_trial_only(error):
                self.error = error
                raise
        finally:
            entry.seconds = time.monotonic() - start
            self.record.update(self.trials)
        if entry.state == FAILED:
            _wandb().finish(exit_code=1)
            return
        run = _wandb().run
        run.log({"objective": entry.objective})
        logged = sorted(name for name in dict(run.summary) if not name.startswith("_"))
        if self.metric not in logged:
            # As in transformers.
            logger.warning("The sweep optimizes metric=%r, which no run logs. They log %s.", self.metric, logged)


def _wandb() -> Any:
    return importlib.import_module("wandb")
