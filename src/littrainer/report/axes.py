"""Scales of a chart: how far its axes reach, where their ticks stand and what these say."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# A power of ten is divided into steps of these sizes.
ROUND_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
# Powers of ten that a float can hold.
SMALLEST_POWER, LARGEST_POWER = -323, 308
# An axis that may choose is logarithmic where the middle nine tenths of the values span this ratio.
LOGARITHMIC_FROM = 100.0
MARGIN = 0.06
# Beyond these, numbers are written with a power of ten.
SMALLEST_PLAIN, LARGEST_PLAIN = 1e-3, 1e6
# The largest tick from which on the ticks of an axis are counted in such units.
UNITS = ((1e9, None), (1e6, (1e6, "M")), (1e4, (1e3, "k")))


@dataclass(frozen=True)
class Axis:
    """One axis.

    Parameters:
        low, high: its ends.
        ticks: where its ticks stand, within the ends.
        labels: what each says.
        logarithmic: whether equal distances are equal ratios.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Where a value stands: 0 at the low end, 1 at the high end."""
        if self.logarithmic:
            return (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        # Halved, since the distance of two large numbers may be more than a float holds.
        return (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)


def step_axis(steps: Iterable[int], most_ticks: int = 7) -> Axis:
    """The axis of optimizer steps."""
    given = list(steps)
    low, high = min(given), max(given)
    if low == high:
        low, high = max(0, low - 1), high + 1
    elif low <= (high - low) / 4:
        low = 0
    return _linear(float(low), float(high), most_ticks, smallest_step=1.0)


def value_axis(values: Iterable[float], scale: str = "auto", most_ticks: int = 7) -> Axis:
    """The axis of a metric.

    Parameters:
        values: finite numbers; without any the axis has no ticks.
        scale: `linear`; `log`, which is linear where a value is not above 0; or `auto`, which is logarithmic where the
            middle nine tenths of the values span more than two powers of ten.
    """
    given = sorted(values)
    if not given:
        return Axis(0.0, 1.0, (), ())
    low, high = given[0], given[-1]
    if low > 0 and (scale == "log" or (scale == "auto" and _middle_ratio(given) >= LOGARITHMIC_FROM)):
        axis = _logarithmic(low, high)
        if len(axis.ticks) > 1:
            return axis
    margin = abs(low) * MARGIN or 1.0 if low == high else high * MARGIN - low * MARGIN
    # What is never below 0 gets no room there.
    bottom = max(0.0, low - margin) if low >= 0 else low - margin
    return _linear(_finite(bottom), _finite(high + margin), most_ticks)


def range_axis(low: float, high: float, logarithmic: bool = False, whole: bool = False, most_ticks: int = 6) -> Axis:
    """The axis of a range that is known, without room beyond its ends.

    Parameters:
        low, high: its ends, finite; one that has no length gets some.
        logarithmic: heeded where both ends are above 0.
        whole: whether only whole numbers stand on it.
    """
    if not high / 2 - low / 2 > 0:
        margin = abs(low) * MARGIN or 1.0
        low, high = _finite(low - margin), _finite(high + margin)
    elif logarithmic and low > 0:
        powers = range(max(math.floor(math.log10(low)), SMALLEST_POWER), min(math.ceil(math.log10(high)), 308) + 1)
        every = max(1, math.ceil(len(powers) / most_ticks))
        ticks = [10.0**power for power in powers if power % every == 0 and low <= 10.0**power <= high]
        if len(ticks) < 2:
            ticks = [low, high]
        return Axis(low, high, tuple(ticks), tuple(map(short_number, ticks)), logarithmic=True)
    return _linear(low, high, most_ticks, smallest_step=1.0 if whole else 0.0)


def _middle_ratio(ascending: list[float]) -> float:
    edge = len(ascending) // 20
    return ascending[-1 - edge] / ascending[edge]


def _linear(low: float, high: float, most_ticks: int, smallest_step: float = 0.0) -> Axis:
    if not low < high:
        low, high = low - 1.0, high + 1.0
    if low == low + (high - low) / most_ticks:
        # Neighbouring floats: no round number lies between them.
        return Axis(low, high, (low,), tuple(labels_of([low])))
    step = max(_round_step(high / most_ticks - low / most_ticks), smallest_step)
    first = math.ceil(low / step)
    ticks = [
        number * step for number in range(first, first + most_ticks + 2) if number * step <= _finite(high * (1 + 1e-12))
    ]
    return Axis(low, high, tuple(ticks), tuple(labels_of(ticks)))


def _round_step(smallest: float) -> float:
    magnitude = 10.0 ** math.floor(math.log10(max(smallest, 1e-300)))
    return next(size * magnitude for size in ROUND_STEPS if size * magnitude >= smallest * (1 - 1e-9))


def _logarithmic(low: float, high: float) -> Axis:
    room = max((math.log10(high) - math.log10(low)) * MARGIN, 0.05)
    bottom, top = math.log10(low) - room, math.log10(high) + room
    every = max(1, math.ceil((top - bottom) / 6))
    first, last = max(math.ceil(bottom), SMALLEST_POWER), min(math.floor(top), LARGEST_POWER)
    powers = [power for power in range(first, last + 1) if power % every == 0]
    ticks = [10.0**power for power in powers]
    if len(ticks) < 3:
        ticks = [
            size * _power_of_ten(power)
            for power in range(math.floor(bottom), math.ceil(top) + 1)
            for size in (1, 2, 5)
            if bottom <= math.log10(size) + power <= top
        ]
    return Axis(
        _power_of_ten(bottom), _power_of_ten(top), tuple(ticks), tuple(map(short_number, ticks)), logarithmic=True
    )


def labels_of(ticks: Sequence[float]) -> list[str]:
    """What the ticks of a linear axis say, all with the same power of ten."""
    largest = max((abs(tick) for tick in ticks), default=0.0)
    unit = next((unit for smallest, unit in UNITS if largest >= smallest), (1.0, ""))
    if unit is None or 0 < largest < SMALLEST_PLAIN:
        return [short_number(tick) for tick in ticks]
    return [f"{tick / unit[0]:.6g}{unit[1]}" if tick else "0" for tick in ticks]


def short_number(value: float, digits: int = 4) -> str:
    """A number as people write it in a table: 0.7871, 1.5e-5, 12,345."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if SMALLEST_PLAIN <= abs(value) < LARGEST_PLAIN:
        if abs(value) >= 10 ** (digits - 1):
            return f"{value:,.0f}" if value == round(value) or abs(value) >= 10**digits else f"{value:,.1f}"
        text = f"{value:.{digits}g}"
        return f"{float(text):g}" if "e" in text else text
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(exponent)}"


def _finite(value: float) -> float:
    return min(max(value, -sys.float_info.max), sys.float_info.max)


def _power_of_ten(exponent: float) -> float:
    """Ten to this power, or what a float can hold that is nearest to it and above 0."""
    return max(10.0**exponent, 5e-324) if exponent < math.log10(sys.float_info.max) else sys.float_info.max
