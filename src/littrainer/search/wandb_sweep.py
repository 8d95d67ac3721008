"""A search that is a sweep of Weights & Biases: its server draws, and an agent in this process trains the trials."""

from __future__ import annotations

import importlib
import inspect
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from littrainer.arguments.did_you_mean import suggestion
from littrainer.distributed.agreement import LostProcess
from littrainer.search.distributions import CATEGORICAL, FLOAT, INTEGER
from littrainer.search.failures import SearchMistake, fails_trial_only
from littrainer.search.memory import release_frames
from littrainer.search.progress_lines import told
from littrainer.search.record import (
    COMPLETE,
    FAILED,
    PRUNED,
    RUNNING,
    SearchRecord,
    TrialRecord,
    best_of,
    error_in_a_line,
)
from littrainer.search.results import BestRun
from littrainer.search.together.search import RunsTrial, searched_together
from littrainer.search.trial import remove_checkpoints
from littrainer.search.trial_parameters import asked, checked_space
from littrainer.tracking.wandb import WandbCallback

if TYPE_CHECKING:
    from littrainer.trainer import Trainer


logger = logging.getLogger(__name__)

KEYWORDS = ("sweep_id", "project", "entity", "name", "metric")
DEFAULT_METRIC = "eval/loss"
# Under which each trial's objective is logged, so that a sweep can go by it.
OBJECTIVE = "objective"


class SweepTrial(dict[str, Any]):
    """The parameters that a sweep has drawn for one of its runs.

    Parameters:
        parameters: by name.
        run_id: what Weights & Biases calls the run.
    """

    def __init__(self, parameters: Mapping[str, Any], run_id: str):
        super().__init__(parameters)
        self.run_id = run_id
        # Optimizer step and objective of each evaluation in training.
        self.reported: list[tuple[int, float]] = []

    def __reduce__(self) -> Any:
        return SweepTrial, (dict(self), self.run_id)


def run_id(trial: Any) -> str:
    """What Weights & Biases calls a trial's run; the processes that have no run know it from the trial."""
    if isinstance(trial, SweepTrial):
        return trial.run_id
    return str(_wandb().run.id)


def report_to_sweep(trainer: Trainer, trial: Any, step: int) -> None:
    """Note the objective of an evaluation for the record; the server has the metrics that the tracker logs."""
    if isinstance(trial, SweepTrial) and isinstance(trainer.objective, float):
        trial.reported.append((step, trainer.objective))


def run_hp_search_wandb(trainer: Trainer, n_trials: int, direction: str, **kwargs: Any) -> BestRun:
    """Search with a sweep.

    Parameters:
        n_trials: runs that this agent takes; with a `sweep_id` other agents may take more.
        direction: "minimize" or "maximize".
        kwargs: `sweep_id` of a sweep that is there, whose space counts; else a sweep is made, with this `name`.
            `project` and `entity` it belongs to. `metric`, as runs log it, that the sweep goes by: "eval/loss", or
            "objective" for what `compute_objective` returns.

    Returns:
        the best of this agent's trials, with the sweep's id as `run_summary`.

    Raises:
        SearchMistake: a keyword is unknown, there are several directions, or the space is no sweep configuration.
        RuntimeError: no trial is complete.
    """
    unknown = [name for name in kwargs if name not in KEYWORDS]
    if unknown:
        raise SearchMistake(
            f"A search with backend='wandb' takes no {unknown[0]!r}: {suggestion(unknown[0], KEYWORDS)}"
        )
    if not isinstance(direction, str):
        raise SearchMistake(
            f"direction={direction!r}: a sweep of Weights & Biases has one metric. Give one direction, or search with "
            'backend="optuna".'
        )
    with _reporting_to_wandb(trainer):
        return searched_together(trainer, lambda run: _Sweep(trainer, run, direction, kwargs).search(n_trials))


@contextmanager
def _reporting_to_wandb(trainer: Trainer) -> Iterator[None]:
    """While this is open the trainer reports to Weights & Biases."""
    if any(isinstance(callback, WandbCallback) for callback in trainer.callback_handler.callbacks):
        yield
        return
    callback = WandbCallback()
    trainer.add_callback(callback)
    try:
        yield
    finally:
        trainer.remove_callback(callback)


class _Sweep:
    """A sweep as its first process carries it out.

    Parameters:
        run_trial: runs a trial and returns its objective.
        options: those of `KEYWORDS` that are given.
    """

    def __init__(self, trainer: Trainer, run_trial: RunsTrial, direction: str, options: dict[str, Any]):
        self.trainer = trainer
        self.run_trial = run_trial
        self.direction = direction
        self.options = options
        self.metric: str = options.get("metric") or DEFAULT_METRIC
        self.parameters: dict[str, Any] = {}
        self.trials: list[TrialRecord] = []
        self.record: SearchRecord | None = None
        self.planned = 0
        # What ends the search.
        self.error: BaseException | None = None
        self.first_failure: BaseException | None = None
        self._is_told_of_metric = False

    def search(self, n_trials: int) -> BestRun:
        """Run the agent until it has had so many trials."""
        wandb = _wandb()
        self.planned = n_trials
        place = {name: self.options.get(name) for name in ("entity", "project")}
        sweep_id = self.options.get("sweep_id")
        if not sweep_id:
            configuration = self._configuration()
            self.parameters = dict(configuration["parameters"])
            sweep_id = wandb.sweep(configuration, **place)
        logger.info("The sweep of Weights & Biases is %s.", sweep_id)
        self.record = SearchRecord(self.trainer, "wandb", [self.direction], str(sweep_id))
        # Failures that the search goes on after do not reach the agent.
        ends = {"max_consecutive_failed_runs": 1}
        accepted = inspect.signature(wandb.agent).parameters
        wandb.agent(
            sweep_id,
            function=self._run_once,
            count=n_trials,
            **place,
            **{name: value for name, value in ends.items() if name in accepted},
        )
        if self.error is not None:
            raise self.error
        return self._best_run(sweep_id)

    def _configuration(self) -> dict[str, Any]:
        """What the sweep is made of.

        Raises:
            SearchMistake: the space names no parameters, or the sweep would end trials in one process of several.
        """
        configuration = checked_space(asked(self.trainer.hp_space, None), may_be_empty=False)
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
                f"{self.trainer.args.world_size} processes train them. Leave it out, or search with "
                'backend="optuna" and a pruner.'
            )
        metric = {**configuration.get("metric", {}), "goal": self.direction, "name": self.metric}
        name = {"name": self.options["name"]} if self.options.get("name") else {}
        return {"method": "random", **configuration, "metric": metric, **name}

    def _run_once(self) -> None:
        """Train one trial; the agent calls this, in a thread of its own, for each run that the server gives it."""
        if self.error is not None:
            # An agent that cannot be told to end after a failure.
            raise self.error
        wandb = _wandb()
        run = wandb.run or wandb.init()
        drawn = {name: value for name, value in dict(run.config).items() if not name.startswith("_")}
        trial = SweepTrial(
            {name: drawn[name] for name in drawn if name in self.parameters or not self.parameters}, run.id
        )
        # Beside the parameters, as transformers has it.
        run.config.update({"assignments": {}, "metric": self.metric}, allow_val_change=True)
        entry = TrialRecord(
            run.id,
            RUNNING,
            parameters=dict(trial),
            distributions=_distributions(self.parameters),
            intermediate=trial.reported,
            folder=self.trainer._get_output_dir(trial=trial),
        )
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
                remove_checkpoints(self.trainer, trial)
                release_frames(error)
                raise
            if isinstance(error, LostProcess) or not fails_trial_only(error):
                self.error = error
                raise
            self.first_failure = self.first_failure or error
        finally:
            entry.seconds = time.monotonic() - start
            self._tell(entry)
        if entry.state == FAILED:
            wandb.finish(exit_code=1)
        elif wandb.run is not None:
            wandb.run.log({OBJECTIVE: entry.objective})
            self._look_for_metric(wandb.run)

    def _tell(self, entry: TrialRecord) -> None:
        assert self.record is not None
        self.record.update(self.trials)
        told(entry, (len(self.trials), self.planned), best_of(self.trials, [self.direction]))

    def _look_for_metric(self, run: Any) -> None:
        logged = sorted(name for name in dict(run.summary) if not name.startswith("_"))
        if self._is_told_of_metric or self.metric in logged:
            return
        self._is_told_of_metric = True
        logger.warning(
            "The sweep goes by metric=%r, which no run logs: it learns nothing from the trials. Runs log %s.",
            self.metric,
            ", ".join(logged),
        )

    def _best_run(self, sweep_id: str) -> BestRun:
        best = best_of(self.trials, [self.direction])
        if not best:
            raise RuntimeError(
                f"No trial of the sweep {sweep_id} is complete"
                + (f"; the first failure: {error_in_a_line(self.first_failure)}." if self.first_failure else ".")
            ) from self.first_failure
        objective = best[0].objective
        assert objective is not None
        return BestRun(best[0].id, objective, best[0].parameters, sweep_id)


def _distributions(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What a sweep draws its parameters from, as a record holds it; those that it has no words for are left out."""
    found: dict[str, Any] = {}
    for name, drawn in parameters.items():
        kind = str(drawn.get("distribution", "")) if isinstance(drawn, Mapping) else "none"
        if kind != "none" and "values" in drawn:
            found[name] = {"kind": CATEGORICAL, "choices": list(drawn["values"])}
        elif kind != "none" and {"min", "max"} <= drawn.keys() and kind != "log_uniform":
            low, high = drawn["min"], drawn["max"]
            whole = kind.startswith("int") or (not kind and isinstance(low, int) and isinstance(high, int))
            step = drawn.get("q", 1 if whole else None)
            found[name] = {
                "kind": INTEGER if whole else FLOAT,
                "low": low,
                "high": high,
                "log": kind.startswith(("log", "q_log", "inv_log")),
                "step": step,
            }
    return found


def _wandb() -> Any:
    return importlib.import_module("wandb")
