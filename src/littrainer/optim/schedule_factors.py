"""The shapes of schedules: factors on the optimizer's learning rate, as functions of the optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

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


def after_linear_warmup(
    step: int, *, after_warmup: Callable[..., float], warmup_steps: int, total_steps: int = 0, **options: Any
) -> float:
    """The factor of a schedule that rises linearly from 0 and then follows `after_warmup`."""
    if step < warmup_steps:
        return float(step) / float(max(1, warmup_steps))
    return after_warmup(step, warmup_steps, total_steps, **options)


def always_one(step: int) -> float:
    """The constant schedule."""
    return 1.0


def constant(step: int, warmup_steps: int, total_steps: int) -> float:
    """No decay."""
    return 1.0


def linear(step: int, warmup_steps: int, total_steps: int) -> float:
    """A straight line to 0."""
    return max(0.0, float(total_steps - step) / float(max(1, total_steps - warmup_steps)))


def cosine(step: int, warmup_steps: int, total_steps: int, num_cycles: float, lowest: float = 0.0) -> float:
    """`num_cycles` waves between 1 and `lowest`."""
    wave = _cosine_wave(_share_done(step, warmup_steps, total_steps), num_cycles)
    return max(0.0, _raised(wave, lowest))


def cosine_with_restarts(step: int, warmup_steps: int, total_steps: int, num_cycles: int) -> float:
    """`num_cycles` falls from 1 to 0."""
    share = _share_done(step, warmup_steps, total_steps)
    if share >= 1.0:
        return 0.0
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((float(num_cycles) * share) % 1.0))))


def polynomial(step: int, warmup_steps: int, total_steps: int, lr_init: float, lr_end: float, power: float) -> float:
    """From `lr_init` to `lr_end` by the given power of what remains."""
    if step > total_steps:
        return lr_end / lr_init
    remaining = 1 - (step - warmup_steps) / (total_steps - warmup_steps)
    return ((lr_init - lr_end) * remaining**power + lr_end) / lr_init


def inverse_sqrt(step: int, warmup_steps: int, total_steps: int, timescale: int) -> float:
    """The inverse square root of the steps, in units of `timescale`."""
    return 1.0 / math.sqrt((step + (timescale - warmup_steps)) / timescale)


def cosine_from_a_share(
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


def warmup_stable_decay(
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
