"""Learning-rate schedules by name and as functions; a training's schedule takes one step with each optimizer step.

Two of them, `reduce_lr_on_plateau` and `greedy`, follow an evaluation metric instead and step with each evaluation.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from littrainer.arguments.choices import SchedulerType
from littrainer.arguments.did_you_mean import format_accepted_names
from littrainer.optim.layerwise import LayerwiseOptimizer, LayerwiseSchedule
from littrainer.runtime.lazy_isinstance import is_a

logger = logging.getLogger(__name__)

# Optimizer steps.
Steps: TypeAlias = int


# Partials of these are the factors of a LambdaLR, because it stores the attributes of any other callable object in its
# state dict, and the saved scheduler.pt has to stay readable by transformers.
def _constant(step: int, warmup_steps: int = 0) -> float:
    return float(step) / float(max(1, warmup_steps)) if step < warmup_steps else 1.0


def _linear(step: int, warmup_steps: int, total_steps: int) -> float:
    if step < warmup_steps:
        return float(step) / float(max(1, warmup_steps))
    return max(0.0, float(total_steps - step) / float(max(1, total_steps - warmup_steps)))


def _cosine(step: int, warmup_steps: int, total_steps: int, num_cycles: float) -> float:
    if step < warmup_steps:
        return float(step) / float(max(1, warmup_steps))
    share = float(step - warmup_steps) / float(max(1, total_steps - warmup_steps))
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * float(num_cycles) * 2.0 * share)))


def get_constant_schedule(optimizer: Optimizer, last_epoch: Steps = -1) -> LambdaLR:
    """The optimizer's own learning rate throughout.

    Parameters:
        optimizer: the optimizer it drives.
        last_epoch: optimizer steps already done, -1 for a new schedule.
    """
    return LambdaLR(optimizer, _constant, last_epoch)


def get_constant_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: Steps, last_epoch: Steps = -1
) -> LambdaLR:
    """A linear rise from 0, then the optimizer's own learning rate.

    Parameters:
        optimizer: the optimizer it drives.
        num_warmup_steps: optimizer steps of the rise.
        last_epoch: optimizer steps already done, -1 for a new schedule.
    """
    return LambdaLR(optimizer, partial(_constant, warmup_steps=num_warmup_steps), last_epoch)


def get_linear_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: Steps, num_training_steps: Steps, last_epoch: Steps = -1
) -> LambdaLR:
    """A linear rise from 0, then a linear fall to 0.

    Parameters:
        optimizer: the optimizer it drives.
        num_warmup_steps: optimizer steps of the rise.
        num_training_steps: optimizer steps of the whole training.
        last_epoch: optimizer steps already done, -1 for a new schedule.
    """
    factor = partial(_linear, warmup_steps=num_warmup_steps, total_steps=num_training_steps)
    return LambdaLR(optimizer, factor, last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: Steps,
    num_training_steps: Steps,
    num_cycles: float = 0.5,
    last_epoch: Steps = -1,
) -> LambdaLR:
    """A linear rise from 0, then cosine waves.

    Parameters:
        optimizer, num_warmup_steps, num_training_steps, last_epoch: as in `get_linear_schedule_with_warmup`.
        num_cycles: waves; half a wave falls from the learning rate to 0.
    """
    factor = partial(_cosine, warmup_steps=num_warmup_steps, total_steps=num_training_steps, num_cycles=num_cycles)
    return LambdaLR(optimizer, factor, last_epoch)


def get_reduce_on_plateau_schedule(optimizer: Optimizer, **kwargs: Any) -> ReduceLROnPlateau:
    """A learning rate that falls when a metric stops improving.

    Parameters:
        optimizer: the optimizer it drives.
        kwargs: keywords of torch's `ReduceLROnPlateau`.
    """
    return ReduceLROnPlateau(optimizer, **kwargs)


SCHEDULES: dict[str, Callable[..., Any]] = {
    SchedulerType.LINEAR.value: get_linear_schedule_with_warmup,
    SchedulerType.COSINE.value: get_cosine_schedule_with_warmup,
    SchedulerType.CONSTANT.value: get_constant_schedule,
    SchedulerType.CONSTANT_WITH_WARMUP.value: get_constant_schedule_with_warmup,
    SchedulerType.REDUCE_ON_PLATEAU.value: get_reduce_on_plateau_schedule,
}
# Functions of transformers' own, which is loaded when one of them is asked for.
OF_TRANSFORMERS: dict[str, str] = {
    SchedulerType.COSINE_WITH_RESTARTS.value: "get_cosine_with_hard_restarts_schedule_with_warmup",
    SchedulerType.POLYNOMIAL.value: "get_polynomial_decay_schedule_with_warmup",
    SchedulerType.INVERSE_SQRT.value: "get_inverse_sqrt_schedule",
    SchedulerType.COSINE_WITH_MIN_LR.value: "get_cosine_with_min_lr_schedule_with_warmup",
    SchedulerType.COSINE_WARMUP_WITH_MIN_LR.value: "get_cosine_with_min_lr_schedule_with_warmup_lr_rate",
    SchedulerType.WARMUP_STABLE_DECAY.value: "get_wsd_schedule",
    SchedulerType.GREEDY.value: "GreedyLR",
}
FOLLOWING_A_METRIC = (SchedulerType.REDUCE_ON_PLATEAU.value, SchedulerType.GREEDY.value)
# transformers takes any option with these and reads none, so a script may well pass some.
WITHOUT_OPTIONS = (SchedulerType.CONSTANT.value, SchedulerType.CONSTANT_WITH_WARMUP.value)
NOT_OPTIONS = ("self", "optimizer", "num_warmup_steps", "num_training_steps")


def get_schedule_factory(key: str) -> Callable[..., Any]:
    """Return the function or class that makes the schedule of a name; an ImportError if transformers lacks it."""
    if key in SCHEDULES:
        return SCHEDULES[key]
    try:
        return getattr(importlib.import_module("transformers.optimization"), OF_TRANSFORMERS[key])
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"lr_scheduler_type={key!r} is a schedule of transformers' own (`{OF_TRANSFORMERS[key]}`), which is not "
            "installed or has none: pip install -U transformers."
        ) from error


def get_scheduler(
    name: SchedulerType | str,
    optimizer: Optimizer,
    num_warmup_steps: Steps | None = None,
    num_training_steps: Steps | None = None,
    scheduler_specific_kwargs: dict[str, Any] | None = None,
) -> Any:
    """The schedule that `lr_scheduler_type` names, attached to an optimizer.

    Parameters:
        name: as in `lr_scheduler_type`.
        optimizer: the optimizer it drives.
        num_warmup_steps: optimizer steps of the rise; needed by all but `constant` and those that follow a metric.
        num_training_steps: optimizer steps of the whole training; needed if the schedule's function needs it.
        scheduler_specific_kwargs: `lr_scheduler_kwargs`, such as `num_cycles`.

    Returns:
        a `LambdaLR`, or the schedule's own class if it follows a metric.

    Raises:
        ValueError: the name is not known, a number of steps is missing, or an option has an impossible value.
        TypeError: an option is unknown, missing or of a wrong type.
    """
    key = SchedulerType(name).value
    options = dict(scheduler_specific_kwargs or {})
    if isinstance(optimizer, LayerwiseOptimizer):
        return _one_schedule_for_each_layer(key, optimizer, num_warmup_steps, num_training_steps, options)
    if options and key in WITHOUT_OPTIONS:
        logger.warning("lr_scheduler_type=%r takes no lr_scheduler_kwargs; %s has no effect.", key, options)
        options = {}
    make = get_schedule_factory(key)
    parameters = inspect.signature(ReduceLROnPlateau if make is get_reduce_on_plateau_schedule else make).parameters
    known = [name for name in parameters if name not in NOT_OPTIONS]
    for name in options:
        if name not in known:
            raise TypeError(
                f"lr_scheduler_kwargs has {name!r}, which lr_scheduler_type={key!r} does not take"
                f"{format_accepted_names(name, known)}."
            )
    given = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
    steps = {name: number for name, number in given.items() if name in parameters}
    for name, number in steps.items():
        if number is None and parameters[name].default is inspect.Parameter.empty:
            raise ValueError(f"get_scheduler({key!r}) needs {name}.")
    try:
        return make(optimizer, **steps, **options)
    except TypeError as error:
        raise TypeError(f"lr_scheduler_kwargs={options} does not fit lr_scheduler_type={key!r}: {error}.") from error


def _one_schedule_for_each_layer(
    key: str, optimizer: LayerwiseOptimizer, warmup_steps: int | None, total_steps: int | None, options: dict[str, Any]
) -> LayerwiseSchedule:
    if key in FOLLOWING_A_METRIC:
        raise ValueError(
            f"lr_scheduler_type={key!r} follows an evaluation metric, and the optimizers of single layers do not; "
            "choose another schedule, or the optimizer that is not layer-wise."
        )
    schedules = {
        parameter: get_scheduler(key, own, warmup_steps, total_steps, options)
        for parameter, own in optimizer.optimizer_dict.items()
    }
    return LayerwiseSchedule(optimizer, schedules)


def is_metric_driven(schedule: Any) -> bool:
    """Whether a schedule takes its steps with an evaluation's metric instead of with the optimizer."""
    # Asked at each step: the usual answer comes first.
    if type(schedule) is LambdaLR:
        return False
    return isinstance(schedule, ReduceLROnPlateau) or is_a(schedule, "greedy schedule")


def step_on_metric(schedule: Any, metrics: Mapping[str, float], metric_for_best_model: str | None) -> None:
    """Step a schedule that follows a metric.

    Parameters:
        metrics: the metrics of an evaluation.
        metric_for_best_model: the metric's name, with or without the prefix `eval_`; the loss by default.
    """
    name = metric_for_best_model or "loss"
    name = name if name.startswith("eval_") else f"eval_{name}"
    if name not in metrics:
        raise KeyError(
            f"The learning rate follows metric_for_best_model, {name!r}, which is not found in the evaluation metrics. "
            f"They are {', '.join(metrics)}: name one of these, or return {name!r} from compute_metrics."
        )
    schedule.step(metrics[name])


def cover_added_groups(schedule: Any) -> None:
    """Let groups that are added to the optimizer later keep the learning rate that they are given.

    torch expects a rate for each group of the optimizer, and a running schedule has none for new ones.
    """
    if not isinstance(schedule, LambdaLR):
        return
    for group in schedule.optimizer.param_groups[len(schedule.base_lrs) :]:
        schedule.base_lrs.append(1.0)
        schedule.lr_lambdas.append(partial(_rate_of, group))


def _rate_of(group: dict[str, Any], step: int) -> float:
    return group["lr"]


def set_schedule_step(schedule: Any, steps: Steps) -> None:
    """Let a schedule that is a function of the step go on as if it had taken so many steps; leave others alone."""
    members = schedule.schedule_dict.values() if isinstance(schedule, LayerwiseSchedule) else [schedule]
    for one in members:
        if isinstance(one, LambdaLR):
            one.last_epoch = steps - 1
            one._step_count -= 1
            one.step()
