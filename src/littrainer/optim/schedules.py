"""Learning-rate schedules by name and as functions."""

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

Steps: TypeAlias = int


# Functions and partials: LambdaLR stores attributes of other callables, and transformers must read scheduler.pt.
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
    """Return a schedule with the optimizer's constant learning rate.

    Parameters:
        optimizer: the optimizer it drives.
        last_epoch: optimizer steps already done, -1 for a new schedule.
    """
    return LambdaLR(optimizer, _constant, last_epoch)


def get_constant_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: Steps, last_epoch: Steps = -1
) -> LambdaLR:
    """Return a schedule with a linear rise from 0, then the optimizer's constant learning rate.

    Parameters:
        optimizer: the optimizer it drives.
        num_warmup_steps: optimizer steps of the rise.
        last_epoch: optimizer steps already done, -1 for a new schedule.
    """
    return LambdaLR(optimizer, partial(_constant, warmup_steps=num_warmup_steps), last_epoch)


def get_linear_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: Steps, num_training_steps: Steps, last_epoch: Steps = -1
) -> LambdaLR:
    """Return a schedule with a linear rise from 0, then a linear fall to 0.

    Parameters:
        optimizer: the optimizer it drives.
        num_warmup_steps: optimizer steps of the rise.
        num_training_steps: optimizer steps of the whole training.
        last_epoch: optimizer steps already done, -1 for a new schedule.

    Examples:
        >>> import torch
        >>> from littrainer import get_linear_schedule_with_warmup
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> get_linear_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=100).get_last_lr()
        [0.0]
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
    """Return a schedule with a linear rise from 0, then cosine waves.

    Parameters:
        optimizer, num_warmup_steps, num_training_steps, last_epoch: as in `get_linear_schedule_with_warmup`.
        num_cycles: waves; half a wave falls from the learning rate to 0.
    """
    factor = partial(_cosine, warmup_steps=num_warmup_steps, total_steps=num_training_steps, num_cycles=num_cycles)
    return LambdaLR(optimizer, factor, last_epoch)


def get_reduce_on_plateau_schedule(optimizer: Optimizer, **kwargs: Any) -> ReduceLROnPlateau:
    """Return a schedule that lowers the learning rate when a metric stops improving.

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
# Schedule -> function in transformers.optimization.
TRANSFORMERS_SCHEDULES: dict[str, str] = {
    SchedulerType.COSINE_WITH_RESTARTS.value: "get_cosine_with_hard_restarts_schedule_with_warmup",
    SchedulerType.POLYNOMIAL.value: "get_polynomial_decay_schedule_with_warmup",
    SchedulerType.INVERSE_SQRT.value: "get_inverse_sqrt_schedule",
    SchedulerType.COSINE_WITH_MIN_LR.value: "get_cosine_with_min_lr_schedule_with_warmup",
    SchedulerType.COSINE_WARMUP_WITH_MIN_LR.value: "get_cosine_with_min_lr_schedule_with_warmup_lr_rate",
    SchedulerType.WARMUP_STABLE_DECAY.value: "get_wsd_schedule",
    SchedulerType.GREEDY.value: "GreedyLR",
}
METRIC_DRIVEN = (SchedulerType.REDUCE_ON_PLATEAU.value, SchedulerType.GREEDY.value)
# transformers ignores their options.
WITHOUT_OPTIONS = (SchedulerType.CONSTANT.value, SchedulerType.CONSTANT_WITH_WARMUP.value)
NOT_OPTIONS = ("self", "optimizer", "num_warmup_steps", "num_training_steps")


def get_schedule_factory(key: str) -> Callable[..., Any]:
    """Return the function or class of a schedule; raise an ImportError if transformers lacks it."""
    if key in SCHEDULES:
        return SCHEDULES[key]
    try:
        return getattr(importlib.import_module("transformers.optimization"), TRANSFORMERS_SCHEDULES[key])
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"lr_scheduler_type={key!r} is a schedule of transformers' own (`{TRANSFORMERS_SCHEDULES[key]}`), which is "
            "not installed or has none: pip install -U transformers."
        ) from error


def get_scheduler(
    name: SchedulerType | str,
    optimizer: Optimizer,
    num_warmup_steps: Steps | None = None,
    num_training_steps: Steps | None = None,
    scheduler_specific_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Return a schedule by name, attached to an optimizer.

    Parameters:
        name: as in `lr_scheduler_type`.
        optimizer: the optimizer it drives.
        num_warmup_steps: optimizer steps of the rise; required by all except `constant` and metric-driven schedules.
        num_training_steps: optimizer steps of the whole training; required if the schedule's function takes it.
        scheduler_specific_kwargs: `lr_scheduler_kwargs`, such as `num_cycles`.

    Returns:
        a `LambdaLR`, or the class of a metric-driven schedule.

    Raises:
        ValueError: the name is unknown, a number of steps is missing, or an option has an impossible value.
        TypeError: an option is unknown, missing or of a wrong type.

    Examples:
        >>> import torch
        >>> from littrainer import get_scheduler
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> schedule = get_scheduler("cosine", optimizer, num_warmup_steps=0, num_training_steps=100)
    """
    key = SchedulerType(name).value
    options = dict(scheduler_specific_kwargs or {})
    if isinstance(optimizer, LayerwiseOptimizer):
        return _build_layerwise_schedule(key, optimizer, num_warmup_steps, num_training_steps, options)
    if options and key in WITHOUT_OPTIONS:
        logger.warning("lr_scheduler_type=%r takes no lr_scheduler_kwargs; %s has no effect.", key, options)
        options = {}
    factory = get_schedule_factory(key)
    signed = ReduceLROnPlateau if factory is get_reduce_on_plateau_schedule else factory
    parameters = inspect.signature(signed).parameters
    accepted = [name for name in parameters if name not in NOT_OPTIONS]
    for name in options:
        if name not in accepted:
            raise TypeError(
                f"lr_scheduler_kwargs has {name!r}, which lr_scheduler_type={key!r} does not take"
                f"{format_accepted_names(name, accepted)}."
            )
    steps = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
    steps = {name: number for name, number in steps.items() if name in parameters}
    for name, number in steps.items():
        if number is None and parameters[name].default is inspect.Parameter.empty:
            raise ValueError(f"get_scheduler({key!r}) needs {name}.")
    try:
        return factory(optimizer, **steps, **options)
    except TypeError as error:
        raise TypeError(f"lr_scheduler_kwargs={options} does not fit lr_scheduler_type={key!r}: {error}.") from error


def _build_layerwise_schedule(
    key: str, optimizer: LayerwiseOptimizer, warmup_steps: int | None, total_steps: int | None, options: dict[str, Any]
) -> LayerwiseSchedule:
    if key in METRIC_DRIVEN:
        raise ValueError(
            f"lr_scheduler_type={key!r} follows an evaluation metric, and the optimizers of single layers do not; "
            "choose another schedule, or the optimizer that is not layer-wise."
        )
    schedules = {
        parameter: get_scheduler(key, member, warmup_steps, total_steps, options)
        for parameter, member in optimizer.optimizer_dict.items()
    }
    return LayerwiseSchedule(optimizer, schedules)


def is_metric_driven(schedule: Any) -> bool:
    # Fast path: called at each step.
    if type(schedule) is LambdaLR:
        return False
    return isinstance(schedule, ReduceLROnPlateau) or is_a(schedule, "greedy schedule")


def step_on_metric(schedule: Any, metrics: Mapping[str, float], metric_for_best_model: str | None) -> None:
    """Step a metric-driven schedule; `eval_` may be missing in the metric's name."""
    name = metric_for_best_model or "loss"
    name = name if name.startswith("eval_") else f"eval_{name}"
    if name not in metrics:
        raise KeyError(
            f"The learning rate follows metric_for_best_model, {name!r}, which is not found in the evaluation metrics. "
            f"They are {', '.join(metrics)}: name one of these, or return {name!r} from compute_metrics."
        )
    schedule.step(metrics[name])


def cover_added_groups(schedule: Any) -> None:
    """Extend a schedule to groups added since it began; they keep their learning rates."""
    if not isinstance(schedule, LambdaLR):
        return
    for group in schedule.optimizer.param_groups[len(schedule.base_lrs) :]:
        schedule.base_lrs.append(1.0)
        schedule.lr_lambdas.append(partial(_get_rate, group))


def _get_rate(group: dict[str, Any], step: int) -> float:
    return group["lr"]


def set_schedule_step(schedule: Any, steps: Steps) -> None:
    """Set the number of steps of a schedule, if it is a function of the step."""
    members = schedule.schedule_dict.values() if isinstance(schedule, LayerwiseSchedule) else [schedule]
    for member in members:
        if isinstance(member, LambdaLR):
            member.last_epoch = steps - 1
            member._step_count -= 1
            member.step()
