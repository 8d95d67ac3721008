"""Learning-rate schedules by name and as functions; a training's schedule takes one step with each optimizer step.

Two of them, `reduce_lr_on_plateau` and `greedy`, follow an evaluation metric instead and step with each evaluation.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from littrainer.arguments.choices import SchedulerType
from littrainer.arguments.did_you_mean import suggestion
from littrainer.errors.lazy_isinstance import is_a
from littrainer.optim.greedy import GreedyLR
from littrainer.optim.layerwise import LayerwiseOptimizer, LayerwiseSchedule

INVERSE_SQRT_TIMESCALE_WITHOUT_WARMUP = 10_000

# How far a rise has come, from 0 to 1, as a function of the share of its steps that are done.
RISES: dict[str, Callable[[float], float]] = {
    "linear": lambda share: share,
    "cosine": lambda share: 0.5 * (1.0 - math.cos(math.pi * share)),
    "1-sqrt": lambda share: 1.0 - math.sqrt(1.0 - share),
}
# What is left of a fall, from 1 to 0; only the cosine has cycles.
FALLS: dict[str, Callable[[float, float], float]] = {
    "linear": lambda share, cycles: 1.0 - share,
    "cosine": lambda share, cycles: _cosine_wave(share, cycles),
    "1-sqrt": lambda share, cycles: 1.0 - math.sqrt(share),
}


def _after_linear_warmup(
    step: int, *, after_warmup: Callable[..., float], warmup_steps: int, total_steps: int = 0, **options: Any
) -> float:
    """The factor of a schedule that rises linearly from 0 and then follows `after_warmup`."""
    if step < warmup_steps:
        return float(step) / float(max(1, warmup_steps))
    return after_warmup(step, warmup_steps, total_steps, **options)


def _constant(step: int, warmup_steps: int = 0, total_steps: int = 0) -> float:
    return 1.0


def _linear(step: int, warmup_steps: int, total_steps: int) -> float:
    return max(0.0, float(total_steps - step) / float(max(1, total_steps - warmup_steps)))


def _cosine(step: int, warmup_steps: int, total_steps: int, num_cycles: float, lowest: float = 0.0) -> float:
    wave = _cosine_wave(_share_done(step, warmup_steps, total_steps), num_cycles)
    return max(0.0, _raised(wave, lowest))


def _cosine_with_restarts(step: int, warmup_steps: int, total_steps: int, num_cycles: int) -> float:
    share = _share_done(step, warmup_steps, total_steps)
    if share >= 1.0:
        return 0.0
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((float(num_cycles) * share) % 1.0))))


def _polynomial(step: int, warmup_steps: int, total_steps: int, lr_init: float, lr_end: float, power: float) -> float:
    """From `lr_init` to `lr_end` by the given power of what remains."""
    if step > total_steps:
        return lr_end / lr_init
    remaining = 1 - (step - warmup_steps) / (total_steps - warmup_steps)
    return ((lr_init - lr_end) * remaining**power + lr_end) / lr_init


def _inverse_sqrt(step: int, warmup_steps: int, total_steps: int, timescale: int) -> float:
    """The inverse square root of the steps, in units of `timescale`."""
    return 1.0 / math.sqrt((step + (timescale - warmup_steps)) / timescale)


def _cosine_from_a_share(
    step: int, *, warmup_steps: int, total_steps: int, num_cycles: float, lowest: float, warmup_lr_rate: float | None
) -> float:
    """A cosine whose warm-up starts above 0, and whose fall is one step ahead so that the last step is the lowest."""
    if step < warmup_steps:
        if warmup_lr_rate is None:
            return (step + 1.0) / max(1.0, float(warmup_steps))
        start = float(warmup_lr_rate)
        return start + (1.0 - start) * float(step) / max(1, float(warmup_steps) - 1)
    share = (float(step) - float(warmup_steps) + 1.0) / max(1.0, float(total_steps) - float(warmup_steps))
    return max(0.0, _raised(_cosine_wave(share, num_cycles), lowest))


def _warmup_stable_decay(
    step: int,
    *,
    warmup_steps: int,
    stable_steps: int,
    decay_steps: int,
    rise: str,
    fall: str,
    lowest: float,
    num_cycles: float,
) -> float:
    """Rise from `lowest`, stay at 1, fall to `lowest` and stay there."""
    if step < warmup_steps:
        return max(0.0, _raised(RISES[rise](float(step) / float(max(1, warmup_steps))), lowest))
    into_decay = step - warmup_steps - stable_steps
    if into_decay < 0:
        return 1.0
    if into_decay < decay_steps:
        return max(0.0, _raised(FALLS[fall](float(into_decay) / float(max(1, decay_steps)), num_cycles), lowest))
    return lowest


def _share_done(step: int, warmup_steps: int, total_steps: int) -> float:
    return float(step - warmup_steps) / float(max(1, total_steps - warmup_steps))


def _cosine_wave(share: float, cycles: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * float(cycles) * 2.0 * share))


def _raised(factor: float, lowest: float) -> float:
    return factor * (1.0 - lowest) + lowest


logger = logging.getLogger(__name__)

# Optimizer steps.
Steps: TypeAlias = int


def _warm_up_then(
    after_warmup: Callable[..., float],
    optimizer: Optimizer,
    last_epoch: int,
    warmup_steps: int,
    total_steps: int = 0,
    **shape: Any,
) -> LambdaLR:
    # A partial, because LambdaLR stores the attributes of any other callable object in its state dict, and the saved
    # scheduler.pt has to stay readable by transformers.
    steps = {"warmup_steps": warmup_steps, "total_steps": total_steps}
    return LambdaLR(optimizer, partial(_after_linear_warmup, after_warmup=after_warmup, **steps, **shape), last_epoch)


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
    return _warm_up_then(_constant, optimizer, last_epoch, num_warmup_steps)


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
    return _warm_up_then(_linear, optimizer, last_epoch, num_warmup_steps, num_training_steps)


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
    return _warm_up_then(_cosine, optimizer, last_epoch, num_warmup_steps, num_training_steps, num_cycles=num_cycles)


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
        _cosine_with_restarts, optimizer, last_epoch, num_warmup_steps, num_training_steps, num_cycles=num_cycles
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
    shape = {"lr_init": lr_init, "lr_end": lr_end, "power": power}
    return _warm_up_then(_polynomial, optimizer, last_epoch, num_warmup_steps, num_training_steps, **shape)


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
        timescale = num_warmup_steps or INVERSE_SQRT_TIMESCALE_WITHOUT_WARMUP
    if timescale <= 0:
        raise ValueError(f"lr_scheduler_kwargs['timescale']={timescale} has to be above 0.")
    return _warm_up_then(_inverse_sqrt, optimizer, last_epoch, num_warmup_steps, timescale=timescale)


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
    shape = {"num_cycles": num_cycles, "lowest": _lowest_factor(optimizer, min_lr, min_lr_rate)}
    return _warm_up_then(_cosine, optimizer, last_epoch, num_warmup_steps, num_training_steps, **shape)


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
        _cosine_from_a_share,
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
    for name, value, known in (("warmup_type", warmup_type, RISES), ("decay_type", decay_type, FALLS)):
        if value not in known:
            raise ValueError(f"lr_scheduler_kwargs[{name!r}]={value!r} is not known; choose one of {', '.join(known)}.")
    if num_stable_steps is None:
        if num_training_steps is None:
            raise ValueError("A warmup_stable_decay schedule needs num_training_steps or num_stable_steps.")
        num_stable_steps = num_training_steps - num_warmup_steps - num_decay_steps
    factor = partial(
        _warmup_stable_decay,
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
    if key not in FOLLOWING_A_METRIC:
        steps = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
        return SCHEDULES[key](optimizer, **_needed_steps(key, steps), **options)
    try:
        return SCHEDULES[key](optimizer, **options)
    except TypeError as error:
        raise TypeError(f"lr_scheduler_kwargs={options} does not fit lr_scheduler_type={key!r}: {error}.") from error


def _check_options(key: str, options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(FOLLOWING_A_METRIC.get(key, SCHEDULES[key])).parameters
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


def leave_added_groups_alone(schedule: Any) -> None:
    """Let groups that join the optimizer while the schedule is running keep the learning rate that they are given.

    torch expects a rate for each group of the optimizer, and a schedule has none for those added later.
    """
    if not isinstance(schedule, LambdaLR):
        return
    for group in schedule.optimizer.param_groups[len(schedule.base_lrs) :]:
        schedule.base_lrs.append(1.0)
        schedule.lr_lambdas.append(partial(_rate_of, group))


def _rate_of(group: dict[str, Any], step: int) -> float:
    return group["lr"]
