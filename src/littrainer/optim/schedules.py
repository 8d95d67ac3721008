"""Learning-rate schedules by name and as functions; a training's schedule takes one step with each optimizer step.

Two of them, `reduce_lr_on_plateau` and `greedy`, follow an evaluation metric instead and step with each evaluation.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from littrainer.arguments.choices import SchedulerType
from littrainer.arguments.did_you_mean import suggestion
from littrainer.ecosystem import is_a
from littrainer.optim import schedule_factors as factors
from littrainer.optim.greedy import GreedyLR
from littrainer.optim.layerwise import LayerwiseOptimizer, LayerwiseSchedule

logger = logging.getLogger(__name__)

# Optimizer steps.
Steps: TypeAlias = int

WARMUP_TYPES, DECAY_TYPES = tuple(factors.RISES), tuple(factors.FALLS)


def _warm_up_then(after_warmup: Callable[..., float], optimizer: Optimizer, last_epoch: int, **shape: Any) -> LambdaLR:
    # A partial, because LambdaLR stores the attributes of any other callable object in its state dict, and the saved
    # scheduler.pt has to stay readable by transformers.
    factor = partial(factors.after_linear_warmup, after_warmup=after_warmup, **shape)
    return LambdaLR(optimizer, factor, last_epoch)


def get_constant_schedule(optimizer: Optimizer, last_epoch: Steps = -1) -> LambdaLR:
    """The optimizer's own learning rate throughout.

    Parameters:
        optimizer: the optimizer it drives.
        last_epoch: optimizer steps already done, -1 for a new schedule.
    """
    return LambdaLR(optimizer, factors.always_one, last_epoch)


def get_constant_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: Steps, last_epoch: Steps = -1
) -> LambdaLR:
    """A linear rise from 0, then the optimizer's own learning rate.

    Parameters:
        optimizer: the optimizer it drives.
        num_warmup_steps: optimizer steps of the rise.
        last_epoch: optimizer steps already done, -1 for a new schedule.
    """
    return _warm_up_then(factors.constant, optimizer, last_epoch, warmup_steps=num_warmup_steps)


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
    return _warm_up_then(
        factors.linear, optimizer, last_epoch, warmup_steps=num_warmup_steps, total_steps=num_training_steps
    )


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
    return _warm_up_then(
        factors.cosine,
        optimizer,
        last_epoch,
        warmup_steps=num_warmup_steps,
        total_steps=num_training_steps,
        num_cycles=num_cycles,
    )


def get_cosine_with_hard_restarts_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: Steps,
    num_training_steps: Steps,
    num_cycles: int = 1,
    last_epoch: Steps = -1,
) -> LambdaLR:
    """A linear rise from 0, then cosine falls to 0, each starting again from the full learning rate.

    Parameters:
        optimizer, num_warmup_steps, num_training_steps, last_epoch: as in `get_linear_schedule_with_warmup`.
        num_cycles: falls.
    """
    return _warm_up_then(
        factors.cosine_with_restarts,
        optimizer,
        last_epoch,
        warmup_steps=num_warmup_steps,
        total_steps=num_training_steps,
        num_cycles=num_cycles,
    )


def get_polynomial_decay_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: Steps,
    num_training_steps: Steps,
    lr_end: float = 1e-7,
    power: float = 1.0,
    last_epoch: Steps = -1,
) -> LambdaLR:
    """A linear rise from 0, then a polynomial fall.

    Parameters:
        optimizer, num_warmup_steps, num_training_steps, last_epoch: as in `get_linear_schedule_with_warmup`.
        lr_end: the learning rate at the end.
        power: to which the share of steps that remain is raised; 1 is a linear fall.

    Raises:
        ValueError: `lr_end` is not below the learning rate, or no step is left for the fall.
    """
    lr_init = optimizer.defaults["lr"]
    if not lr_init > lr_end:
        raise ValueError(
            f"lr_scheduler_type='polynomial' ends at lr_end={lr_end}, which must be below the learning rate it starts "
            f"from ({lr_init}); lower lr_scheduler_kwargs['lr_end']."
        )
    if num_warmup_steps == num_training_steps:
        raise ValueError(
            f"lr_scheduler_type='polynomial' has no step left to fall after {num_warmup_steps} steps of warm-up; lower "
            "warmup_steps."
        )
    return _warm_up_then(
        factors.polynomial,
        optimizer,
        last_epoch,
        warmup_steps=num_warmup_steps,
        total_steps=num_training_steps,
        lr_init=lr_init,
        lr_end=lr_end,
        power=power,
    )


def get_inverse_sqrt_schedule(
    optimizer: Optimizer, num_warmup_steps: Steps, timescale: Steps | None = None, last_epoch: Steps = -1
) -> LambdaLR:
    """A linear rise from 0, then a fall with the inverse square root of the steps.

    Parameters:
        optimizer: the optimizer it drives.
        num_warmup_steps: optimizer steps of the rise.
        timescale: steps that count as one; by default `num_warmup_steps`, or 10,000 where there is no warm-up.
        last_epoch: optimizer steps already done, -1 for a new schedule.

    Raises:
        ValueError: `timescale` is not above 0.
    """
    if timescale is None:
        timescale = num_warmup_steps or factors.INVERSE_SQRT_TIMESCALE_WITHOUT_WARMUP
    if timescale <= 0:
        raise ValueError(f"lr_scheduler_kwargs['timescale']={timescale} has to be above 0.")
    return _warm_up_then(
        factors.inverse_sqrt, optimizer, last_epoch, warmup_steps=num_warmup_steps, timescale=timescale
    )


def get_cosine_with_min_lr_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: Steps,
    num_training_steps: Steps,
    num_cycles: float = 0.5,
    last_epoch: Steps = -1,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> LambdaLR:
    """A linear rise from 0, then cosine waves that go no lower than a given learning rate.

    Parameters:
        optimizer, num_warmup_steps, num_training_steps, last_epoch: as in `get_linear_schedule_with_warmup`.
        num_cycles: waves; half a wave falls from the learning rate to the lowest one.
        min_lr: the lowest learning rate; give this or `min_lr_rate`.
        min_lr_rate: the lowest learning rate as a share of the optimizer's.

    Raises:
        ValueError: neither or both of the two are given.
    """
    return _warm_up_then(
        factors.cosine,
        optimizer,
        last_epoch,
        warmup_steps=num_warmup_steps,
        total_steps=num_training_steps,
        num_cycles=num_cycles,
        lowest=_lowest_factor(optimizer, min_lr, min_lr_rate),
    )


def get_cosine_with_min_lr_schedule_with_warmup_lr_rate(
    optimizer: Optimizer,
    num_warmup_steps: Steps,
    num_training_steps: Steps,
    num_cycles: float = 0.5,
    last_epoch: Steps = -1,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> LambdaLR:
    """As `get_cosine_with_min_lr_schedule_with_warmup`, but the rise starts above 0.

    Parameters:
        optimizer, num_warmup_steps, num_training_steps, num_cycles, last_epoch, min_lr, min_lr_rate: as there.
        warmup_lr_rate: where the rise starts, as a share of the optimizer's learning rate; by default one step up.

    Raises:
        ValueError: neither or both of `min_lr` and `min_lr_rate` are given.
    """
    factor = partial(
        factors.cosine_from_a_share,
        warmup_steps=num_warmup_steps,
        total_steps=num_training_steps,
        num_cycles=num_cycles,
        lowest=_lowest_factor(optimizer, min_lr, min_lr_rate),
        warmup_lr_rate=warmup_lr_rate,
    )
    return LambdaLR(optimizer, factor, last_epoch)


def _lowest_factor(optimizer: Optimizer, min_lr: float | None, min_lr_rate: float | None) -> float:
    if (min_lr is None) == (min_lr_rate is None):
        raise ValueError(
            f"lr_scheduler_kwargs has min_lr={min_lr} and min_lr_rate={min_lr_rate}; this schedule needs exactly one."
        )
    return min_lr / optimizer.defaults["lr"] if min_lr_rate is None else min_lr_rate


def get_wsd_schedule(
    optimizer: Optimizer,
    num_warmup_steps: Steps,
    num_decay_steps: Steps,
    num_training_steps: Steps | None = None,
    num_stable_steps: Steps | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0,
    num_cycles: float = 0.5,
    last_epoch: Steps = -1,
) -> LambdaLR:
    """Warm-up, a stable stretch at the full learning rate, and decay.

    Parameters:
        optimizer: the optimizer it drives.
        num_warmup_steps: optimizer steps of the rise.
        num_decay_steps: optimizer steps of the decay.
        num_training_steps: optimizer steps of the whole training; needed without `num_stable_steps`.
        num_stable_steps: optimizer steps of the stretch; by default what `num_training_steps` leaves for it.
        warmup_type, decay_type: `linear`, `cosine` or `1-sqrt`.
        min_lr_ratio: the learning rate at both ends, as a share of the optimizer's.
        num_cycles: waves of a decay of the type `cosine`.
        last_epoch: optimizer steps already done, -1 for a new schedule.

    Raises:
        ValueError: a type is not known, or neither number of steps is given.
    """
    for name, value, known in (("warmup_type", warmup_type, WARMUP_TYPES), ("decay_type", decay_type, DECAY_TYPES)):
        if value not in known:
            raise ValueError(f"lr_scheduler_kwargs[{name!r}]={value!r} is not known; choose one of {', '.join(known)}.")
    if num_stable_steps is None:
        if num_training_steps is None:
            raise ValueError("A warmup_stable_decay schedule needs num_training_steps or num_stable_steps.")
        num_stable_steps = num_training_steps - num_warmup_steps - num_decay_steps
    factor = partial(
        factors.warmup_stable_decay,
        warmup_steps=num_warmup_steps,
        stable_steps=num_stable_steps,
        decay_steps=num_decay_steps,
        rise=warmup_type,
        fall=decay_type,
        lowest=min_lr_ratio,
        num_cycles=num_cycles,
    )
    return LambdaLR(optimizer, factor, last_epoch)


def get_reduce_on_plateau_schedule(optimizer: Optimizer, **kwargs: Any) -> ReduceLROnPlateau:
    """A learning rate that falls when a metric stops improving.

    Parameters:
        optimizer: the optimizer it drives.
        kwargs: keywords of torch's `ReduceLROnPlateau`.
    """
    return ReduceLROnPlateau(optimizer, **kwargs)


def get_greedy_schedule(optimizer: Optimizer, **kwargs: Any) -> GreedyLR:
    """A learning rate that rises while a metric improves and falls when it stops.

    Parameters:
        optimizer: the optimizer it drives.
        kwargs: keywords of `GreedyLR`.
    """
    return GreedyLR(optimizer, **kwargs)


SCHEDULES: dict[str, Callable[..., Any]] = {
    SchedulerType.LINEAR.value: get_linear_schedule_with_warmup,
    SchedulerType.COSINE.value: get_cosine_schedule_with_warmup,
    SchedulerType.COSINE_WITH_RESTARTS.value: get_cosine_with_hard_restarts_schedule_with_warmup,
    SchedulerType.POLYNOMIAL.value: get_polynomial_decay_schedule_with_warmup,
    SchedulerType.CONSTANT.value: get_constant_schedule,
    SchedulerType.CONSTANT_WITH_WARMUP.value: get_constant_schedule_with_warmup,
    SchedulerType.INVERSE_SQRT.value: get_inverse_sqrt_schedule,
    SchedulerType.COSINE_WITH_MIN_LR.value: get_cosine_with_min_lr_schedule_with_warmup,
    SchedulerType.COSINE_WARMUP_WITH_MIN_LR.value: get_cosine_with_min_lr_schedule_with_warmup_lr_rate,
    SchedulerType.WARMUP_STABLE_DECAY.value: get_wsd_schedule,
    SchedulerType.REDUCE_ON_PLATEAU.value: get_reduce_on_plateau_schedule,
    SchedulerType.GREEDY.value: get_greedy_schedule,
}
# Schedules that follow a metric -> whose keywords their options are.
FOLLOWING_A_METRIC: dict[str, type] = {
    SchedulerType.REDUCE_ON_PLATEAU.value: ReduceLROnPlateau,
    SchedulerType.GREEDY.value: GreedyLR,
}
# transformers takes any option with these and reads none, so a script may well pass some.
WITHOUT_OPTIONS = (SchedulerType.CONSTANT.value, SchedulerType.CONSTANT_WITH_WARMUP.value)
NOT_OPTIONS = ("self", "optimizer", "num_warmup_steps", "num_training_steps")


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
        num_training_steps: optimizer steps of the whole training; needed where the schedule's function needs it.
        scheduler_specific_kwargs: `lr_scheduler_kwargs`, such as `num_cycles`.

    Returns:
        a `LambdaLR`, or the schedule's own class where it follows a metric.

    Raises:
        ValueError: the name is not known, a number of steps is missing, or an option has a value that cannot be.
        TypeError: an option that this schedule does not take, or that is no number where it has to be one.
    """
    key = SchedulerType(name).value
    options = dict(scheduler_specific_kwargs or {})
    if isinstance(optimizer, LayerwiseOptimizer):
        return _one_schedule_for_each_layer(key, optimizer, num_warmup_steps, num_training_steps, options)
    if options and key in WITHOUT_OPTIONS:
        logger.warning("lr_scheduler_type=%r takes no lr_scheduler_kwargs; %s has no effect.", key, options)
        options = {}
    _check_options(key, options)
    steps = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
    needed = _needed_steps(key, steps)
    if key not in FOLLOWING_A_METRIC:
        return SCHEDULES[key](optimizer, **needed, **options)
    try:
        return SCHEDULES[key](optimizer, **options)
    except TypeError as error:
        raise TypeError(f"lr_scheduler_kwargs={options} does not fit lr_scheduler_type={key!r}: {error}.") from error


def _check_options(key: str, options: Mapping[str, Any]) -> None:
    parameters = _parameters_of_options(key)
    known = [name for name in parameters if name not in NOT_OPTIONS]
    for name, value in options.items():
        if name not in known:
            raise TypeError(
                f"lr_scheduler_kwargs has {name!r}, which lr_scheduler_type={key!r} does not take "
                f"({suggestion(name, known)}); it takes {', '.join(known)}."
            )
        default = parameters[name].default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_unset = value is None and default is None
        if not (is_number or is_unset or isinstance(default, str) or key in FOLLOWING_A_METRIC):
            raise TypeError(f"lr_scheduler_kwargs has {name}={value!r}, which has to be a number.")
    needed = [name for name in known if parameters[name].default is inspect.Parameter.empty]
    missing = [name for name in needed if name not in options]
    if missing:
        raise TypeError(f"lr_scheduler_type={key!r} needs lr_scheduler_kwargs with {', '.join(missing)}.")


def _parameters_of_options(key: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(FOLLOWING_A_METRIC.get(key, SCHEDULES[key])).parameters


def _needed_steps(key: str, steps: dict[str, int | None]) -> dict[str, int | None]:
    parameters = inspect.signature(SCHEDULES[key]).parameters
    needed = {name: number for name, number in steps.items() if name in parameters}
    for name, number in needed.items():
        if number is None and parameters[name].default is inspect.Parameter.empty:
            raise ValueError(f"get_scheduler({key!r}) needs {name}.")
    return needed


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


def steps_with_metric(schedule: Any) -> bool:
    """Whether a schedule takes its steps with an evaluation's metric instead of with the optimizer."""
    # The usual answer, which is asked for at each step.
    if type(schedule) is LambdaLR:
        return False
    return isinstance(schedule, tuple(FOLLOWING_A_METRIC.values())) or is_a(schedule, "greedy schedule")


def step_with_metric(schedule: Any, metrics: Mapping[str, float], metric_for_best_model: str | None) -> None:
    """One step of a schedule that follows a metric.

    Parameters:
        metrics: what an evaluation returned.
        metric_for_best_model: the metric's name, with or without the prefix `eval_`; the loss by default.

    Raises:
        KeyError: the evaluation did not return that metric.
    """
    name = metric_for_best_model or "loss"
    name = name if name.startswith("eval_") else f"eval_{name}"
    if name not in metrics:
        raise KeyError(
            f"The learning rate follows metric_for_best_model, {name!r}, which is not found in the evaluation metrics. "
            f"They are {', '.join(metrics)}: name one of these, or return {name!r} from compute_metrics."
        )
    schedule.step(metrics[name])
