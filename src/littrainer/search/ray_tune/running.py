"""A search on Ray Tune: each trial in a process that Ray starts, on this machine or on others."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from littrainer.compat import redirect
from littrainer.search.ray_tune.keywords import checked_keywords, pauses_trials, time_limits
from littrainer.search.ray_tune.trial import OBJECTIVE, TrialSetting, WaitsForTraining, report_to_ray, train_trial
from littrainer.search.results import BestRun
from littrainer.search.travelling.packing import packed
from littrainer.search.travelling.surroundings import surroundings
from littrainer.search.trial_parameters import NO_PARAMETERS, checked_space, names_for_model

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

__all__ = ["report_to_ray", "run_hp_search_ray"]

SCOPE = "RAY_SCOPE"
# What of a trial's objectives counts when trials are compared; "all" means the best of them.
SCOPES = ("last", "all", "avg", "last-5-avg", "last-10-avg")
NEW_OUTPUT = "RAY_AIR_NEW_OUTPUT"
# The prefix of the names of an experiment and of its trials.
NAME = "hyperparameter_search"


def run_hp_search_ray(trainer: Trainer, n_trials: int, direction: str | list[str], **kwargs: Any) -> BestRun:
    """Search on Ray Tune.

    Parameters:
        n_trials: samples of the space; a `grid_search` in it is gone through in each of them.
        direction: `minimize` or `maximize`.
        kwargs: keywords of `ray.tune.run`. By default a trial gets one CPU, and a GPU where there is one, failed trials
            do not end the search (`raise_on_failed_trial=False`), and a `CLIReporter` shows how trials stand. The
            environment variable `RAY_SCOPE` says what of a trial's objectives counts, `last` by default.

    Returns:
        the best of the trials that have not failed, with Ray's `ExperimentAnalysis` as `run_summary`.

    Raises:
        ValueError, TypeError: several directions, an unknown keyword, a scheduler for the other direction, or a wrong
            `RAY_SCOPE`.
        RuntimeError: the scheduler needs evaluations while training and there are none; no trial was completed; or
            several processes search together.
        KeyboardInterrupt: Ctrl-C ended the search; Ray says how to resume it.
        SystemExit, KeyboardInterrupt: the script raised it in a trial.
        SearchMistake, or what is no failure of hyperparameters: a trial shows that the script is wrong.
    """
    scope = _checked_scope()
    mode = _mode(direction)
    if trainer.args.world_size > 1:
        raise RuntimeError(
            "A search on Ray Tune has one process, and Ray starts those of the trials, each with a GPU where there are "
            f"any; this one has {trainer.args.world_size}. Start one process "
            "(`littrainer run --devices 1`), or search with backend='optuna'."
        )
    space = checked_space(trainer.hp_space(None), may_be_empty="search_alg" in kwargs)
    keywords = checked_keywords(trainer, mode, kwargs)
    scheduler = keywords.get("scheduler")
    names = {**space, **(getattr(scheduler, "_hyperparam_mutations", None) or {})}
    names_for_model(trainer, {name: value for name, value in names.items() if name not in NO_PARAMETERS})

    import ray.tune
    import ray.util.client

    from littrainer.search.ray_tune.following import INTERRUPTED, SEARCH_HAS_ENDED, Following
    from littrainer.search.ray_tune.interruption import Interruption

    planned = None if n_trials < 0 else n_trials * _grid_size(space)
    following = Following(trainer, space, str(direction), planned, time_limits(scheduler))
    interruption = Interruption()
    setting = TrialSetting(surroundings(), str(direction), redirect.is_installed(), pauses_trials(scheduler))
    trainable = ray.tune.with_parameters(train_trial, packed_trainer=packed(trainer), setting=setting)
    trainable.__name__ = NAME
    trainable.__mixins__ = (WaitsForTraining,)
    # Else Ray carries the search out on the cluster, where callbacks of this process hear nothing.
    if not ray.util.client.ray.is_connected():
        keywords["callbacks"] = [*(keywords.get("callbacks") or []), following, interruption]
    try:
        with _output_that_reports(), interruption.awaited():
            analysis = ray.tune.run(trainable, config=space, num_samples=n_trials, **keywords)
    except BaseException as error:
        following.leave_unfinished(INTERRUPTED if isinstance(error, KeyboardInterrupt) else SEARCH_HAS_ENDED)
        if following.mistake is not None:
            raise following.mistake from None
        raise
    if interruption.has_come or following.has_unfinished(analysis.trials):
        following.leave_unfinished(INTERRUPTED)
        raise KeyboardInterrupt
    following.take_in(analysis.trials)
    following.refuse_without_result(analysis.trials)
    best = best_trial(following.completed(analysis.trials), mode, scope)
    following.close(best)
    return BestRun(best.trial_id, best.last_result[OBJECTIVE], best.config, analysis)


def _checked_scope() -> str:
    scope = os.environ.get(SCOPE, SCOPES[0])
    if scope not in SCOPES:
        raise ValueError(f"The environment variable {SCOPE} is {scope!r}; it can be {', '.join(SCOPES)}.")
    return scope


def _mode(direction: str | list[str]) -> str:
    directions = [direction] if isinstance(direction, str) else list(direction)
    if len(directions) != 1:
        raise ValueError(
            f"Ray Tune searches for one objective, and direction names {len(directions)} ({', '.join(directions)}): "
            "give one direction, and let compute_objective return one number, or search with backend='optuna'."
        )
    return "min" if directions[0] == "minimize" else "max"


def _grid_size(space: dict[str, Any]) -> int:
    grids = (value["grid_search"] for value in space.values() if isinstance(value, dict) and "grid_search" in value)
    return math.prod(len(values) for values in grids)


def best_trial(trials: list[Any], mode: str, scope: str) -> Any:
    """The best of Ray's trials.

    Parameters:
        mode: `min` or `max`.
        scope: one of `SCOPES`.
    """
    of_trial = mode if scope == "all" else scope
    choose = min if mode == "min" else max
    return choose(trials, key=lambda trial: trial.metric_analysis[OBJECTIVE][of_trial])


@contextlib.contextmanager
def _output_that_reports() -> Iterator[None]:
    """Let Ray use progress reporters, which its newer kind of output passes over, unless the environment decides."""
    if NEW_OUTPUT in os.environ:
        yield
        return
    os.environ[NEW_OUTPUT] = "0"
    try:
        yield
    finally:
        os.environ.pop(NEW_OUTPUT, None)
