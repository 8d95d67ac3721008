"""Learning-rate schedules: each is a factor on the optimizer's learning rate, a function of the optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from littrainer.arguments.choices import SchedulerType

INVERSE_SQRT_TIMESCALE_WITHOUT_WARMUP = 10_000


def _progress(step: int, warmup_steps: int, total_steps: int) -> float:
    return float(step - warmup_steps) / float(max(1, total_steps - warmup_steps))


def _linear(step: int, warmup_steps: int, total_steps: int) -> float:
    return max(0.0, float(total_steps - step) / float(max(1, total_steps - warmup_steps)))


def _cosine(step: int, warmup_steps: int, total_steps: int, num_cycles: float = 0.5) -> float:
    turn = math.pi * float(num_cycles) * 2.0 * _progress(step, warmup_steps, total_steps)
    return max(0.0, 0.5 * (1.0 + math.cos(turn)))


def _cosine_with_restarts(step: int, warmup_steps: int, total_steps: int, num_cycles: int = 1) -> float:
    progress = _progress(step, warmup_steps, total_steps)
    if progress >= 1.0:
        return 0.0
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((float(num_cycles) * progress) % 1.0))))


def _polynomial(
    step: int, warmup_steps: int, total_steps: int, *, lr_init: float, lr_end: float = 1e-7, power: float = 1.0
) -> float:
    if step > total_steps:
        return lr_end / lr_init
    remaining = 1 - (step - warmup_steps) / (total_steps - warmup_steps)
    return ((lr_init - lr_end) * remaining**power + lr_end) / lr_init


def _constant(step: int, warmup_steps: int, total_steps: int) -> float:
    return 1.0


def _inverse_sqrt(step: int, warmup_steps: int, total_steps: int, timescale: int | None = None) -> float:
    scale = timescale or warmup_steps or INVERSE_SQRT_TIMESCALE_WITHOUT_WARMUP
    return 1.0 / math.sqrt((step + scale - warmup_steps) / scale)


SCHEDULES: dict[str, Callable[..., float]] = {
    SchedulerType.LINEAR.value: _linear,
    SchedulerType.COSINE.value: _cosine,
    SchedulerType.COSINE_WITH_RESTARTS.value: _cosine_with_restarts,
    SchedulerType.POLYNOMIAL.value: _polynomial,
    SchedulerType.CONSTANT.value: _constant,
    SchedulerType.CONSTANT_WITH_WARMUP.value: _constant,
    SchedulerType.INVERSE_SQRT.value: _inverse_sqrt,
}


def _factor(
    step: int, *, after_warmup: Callable[..., float], warmup_steps: int, total_steps: int, **options: Any
) -> float:
    if step < warmup_steps:
        return float(step) / float(max(1, warmup_steps))
    return after_warmup(step, warmup_steps, total_steps, **options)


def build_schedule(
    name: SchedulerType | str,
    optimizer: Optimizer,
    *,
    warmup_steps: int,
    total_steps: int,
    options: dict[str, Any] | None = None,
) -> LambdaLR:
    """The schedule that `lr_scheduler_type` names, attached to an optimizer.

    Parameters:
        name: one of the keys of `SCHEDULES`.
        warmup_steps: optimizer steps of linear rise from 0; the `constant` schedule has none.
        total_steps: optimizer steps of the whole training.
        options: `lr_scheduler_kwargs`, such as `num_cycles`.

    Raises:
        ValueError: the name is not in the table, or `polynomial` ends above the rate it starts from.
        TypeError: an option that this schedule does not take.
    """
    key = SchedulerType(name).value
    if key not in SCHEDULES:
        raise ValueError(f"lr_scheduler_type={key!r} is not available; choose one of {', '.join(sorted(SCHEDULES))}.")
    options = dict(options or {})
    if key == SchedulerType.CONSTANT.value:
        warmup_steps, options = 0, {}
    if key == SchedulerType.POLYNOMIAL.value:
        options["lr_init"] = optimizer.defaults["lr"]
        if not options["lr_init"] > options.get("lr_end", 1e-7):
            raise ValueError(
                f"lr_scheduler_type='polynomial' ends at lr_end={options.get('lr_end', 1e-7)}, which must be below the "
                f"learning rate it starts from ({options['lr_init']}); lower lr_scheduler_kwargs['lr_end']."
            )
    # A partial, because LambdaLR stores the attributes of any other callable object in its state dict, and the saved
    # scheduler.pt has to stay readable by transformers.
    factor = partial(
        _factor, after_warmup=SCHEDULES[key], warmup_steps=warmup_steps, total_steps=total_steps, **options
    )
    return LambdaLR(optimizer, factor)
