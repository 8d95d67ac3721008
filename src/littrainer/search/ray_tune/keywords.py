"""The keywords of `ray.tune.run` that a search passes on: checked, and with this package's defaults."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from littrainer.arguments.choices import IntervalStrategy
from littrainer.arguments.did_you_mean import suggestion
from littrainer.search.ray_tune.trial import OBJECTIVE

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

# Keywords of ray.tune.run that the search decides -> where they are given instead.
DECIDED_BY_SEARCH = {
    "run_or_experiment": "what is run is the Trainer's training",
    "config": "hp_space returns the space",
    "num_samples": "n_trials says how many trials there are",
}
# By the names of their classes, exactly: these end trials and never pause one. Of any other it is not known.
NEVER_PAUSES = ("FIFOScheduler", "AsyncHyperBandScheduler")
NEEDS_NO_EVALUATION = "FIFOScheduler"
# Ray's "status only": this package writes a line of its own for each trial.
STATUS_ONLY = 1
MODES = {"min": "minimize", "max": "maximize"}


def checked_keywords(trainer: Trainer, mode: str, given: dict[str, Any]) -> dict[str, Any]:
    """The keywords to call `ray.tune.run` with.

    Parameters:
        mode: `min` or `max`.
        given: as they were passed to `hyperparameter_search`.

    Raises:
        TypeError: a keyword is unknown, or not for the caller to give.
        ValueError: the scheduler is for the other direction, or trials would get more than one GPU.
        RuntimeError: the scheduler needs evaluations while training, and the arguments ask for none.
    """
    import ray.tune
    from ray.tune import CLIReporter
    from ray.tune.schedulers import create_scheduler

    _refuse_unknown(given, inspect.signature(ray.tune.run).parameters)
    keywords = dict(given)
    scheduler = keywords.get("scheduler")
    if isinstance(scheduler, str):
        scheduler = keywords["scheduler"] = create_scheduler(scheduler)
    if scheduler is not None:
        _check_scheduler(trainer, scheduler, mode)
    if keywords.get("resources_per_trial") is None:
        keywords["resources_per_trial"] = {"cpu": 1, **({"gpu": 1} if trainer.args.n_gpu > 0 else {})}
    _refuse_several_gpus(keywords["resources_per_trial"])
    if keywords.get("metric") is None and keywords.get("mode") is None and _knows_no_metric(keywords):
        keywords["metric"], keywords["mode"] = OBJECTIVE, mode
    keywords.setdefault("raise_on_failed_trial", False)
    keywords.setdefault("progress_reporter", CLIReporter(metric_columns=[OBJECTIVE]))
    keywords.setdefault("verbose", STATUS_ONLY)
    return keywords


def pauses_trials(scheduler: Any) -> bool:
    """Whether a scheduler may pause a trial, or give it another one's place, at any report."""
    return scheduler is not None and type(scheduler).__name__ not in NEVER_PAUSES


def time_limits(scheduler: Any) -> dict[str, float]:
    """Up to where a scheduler lets its best trials train, by the entry of a result that it counts in."""
    limit = getattr(scheduler, "_max_t", None) or getattr(scheduler, "_max_t_attr", None)
    counted_in = getattr(scheduler, "_time_attr", None)
    return {counted_in: limit} if isinstance(counted_in, str) and isinstance(limit, (int, float)) else {}


def _refuse_unknown(given: dict[str, Any], parameters: Any) -> None:
    known = [name for name in parameters if not name.startswith("_") and name not in DECIDED_BY_SEARCH]
    for name in given:
        if name in DECIDED_BY_SEARCH:
            raise TypeError(f"{name} is not for hyperparameter_search to pass on: {DECIDED_BY_SEARCH[name]}.")
        if name not in known:
            raise TypeError(f"ray.tune.run has no keyword {name!r} ({suggestion(name, known)}).")


def _check_scheduler(trainer: Trainer, scheduler: Any, mode: str) -> None:
    name = type(scheduler).__name__
    args = trainer.args
    if name != NEEDS_NO_EVALUATION and (not args.do_eval or args.eval_strategy == IntervalStrategy.NO):
        raise RuntimeError(
            f"{name} goes by evaluations while trials train, and eval_strategy='no' gives none: set "
            "eval_strategy='steps' or 'epoch' in the arguments, or pass no scheduler."
        )
    own = getattr(scheduler, "_mode", None)
    if getattr(scheduler, "_metric", None) == OBJECTIVE and own in MODES and own != mode:
        raise ValueError(
            f"{name} has mode={own!r} and the search direction={MODES[mode]!r}: it would keep the worst trials. Give "
            f"it mode={mode!r}, or the search direction={MODES[own]!r}."
        )


def _refuse_several_gpus(resources: Any) -> None:
    gpus = resources.get("gpu", 0) if isinstance(resources, dict) else 0
    if gpus and gpus > 1:
        raise ValueError(
            f"resources_per_trial gives {gpus} GPUs to each trial, and a trial of a Ray search trains in one process "
            "on one GPU. Give it at most 1, or search with backend='optuna' in several processes."
        )


def _knows_no_metric(keywords: dict[str, Any]) -> bool:
    """Whether neither the scheduler nor the search algorithm has been told what to go by."""
    algorithm = keywords.get("search_alg")
    inner = getattr(algorithm, "searcher", algorithm)
    return getattr(keywords.get("scheduler"), "_metric", None) is None and getattr(inner, "metric", None) is None
