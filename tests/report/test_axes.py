from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from littrainer.report.axes import range_axis, short_number, step_axis, value_axis

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.31, 0.88], ("0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9")),
        ([0.0, 5e-5], ("0", "1e-5", "2e-5", "3e-5", "4e-5", "5e-5")),
        ([3.0], ("2.9", "3", "3.1")),
        ([12_000, 88_000], ("20k", "40k", "60k", "80k")),
        ([0.0], ("0", "0.2", "0.4", "0.6", "0.8", "1")),
        ([], ()),
    ],
)
def test_ticks_stand_at_round_values(values: list[float], labels: tuple[str, ...]) -> None:
    assert value_axis(values).labels == labels


def test_values_over_several_powers_of_ten_get_a_logarithmic_axis() -> None:
    axis = value_axis([10.0, 1.0, 0.1, 0.01])
    assert axis.logarithmic
    assert axis.labels == ("0.01", "0.1", "1", "10")
    assert axis.share(0.1) - axis.share(0.01) == pytest.approx(axis.share(10) - axis.share(1))


def test_a_single_outlier_does_not_make_an_axis_logarithmic() -> None:
    assert not value_axis([0.5] * 30 + [1e-6]).logarithmic


@pytest.mark.parametrize(("scale", "logarithmic"), [("linear", False), ("log", True), ("auto", False)])
def test_the_scale_may_be_asked_for(scale: str, logarithmic: bool) -> None:
    assert value_axis([1.0, 30.0], scale).logarithmic is logarithmic


def test_values_that_are_not_above_zero_keep_a_linear_axis() -> None:
    assert not value_axis([0.0, 1e9], "log").logarithmic


def test_steps_are_whole_and_begin_at_zero_where_that_is_near() -> None:
    assert step_axis([10, 640]).low == 0
    assert step_axis([900, 1000]).low == 900
    assert step_axis([1, 3]).labels == ("1", "2", "3")
    assert step_axis([5]).labels == ("4", "5", "6")


@example([1.1e276, 1.1e-273], "log")
@given(st.lists(FINITE, min_size=1, max_size=5), st.sampled_from(["auto", "linear", "log"]))
def test_every_finite_value_has_its_place_between_the_ends(values: list[float], scale: str) -> None:
    axis = value_axis(values, scale)
    assert all(math.isfinite(end) for end in (axis.low, axis.high)) and axis.low < axis.high
    assert all(-1e-9 <= axis.share(value) <= 1 + 1e-9 for value in values)
    assert all(-1e-9 <= axis.share(tick) <= 1 + 1e-9 for tick in axis.ticks)
    assert len(axis.ticks) == len(axis.labels) <= 12


@given(st.lists(st.integers(0, 2**53), min_size=1, max_size=5))
def test_every_step_has_its_place_between_the_ends(steps: list[int]) -> None:
    axis = step_axis(steps)
    assert all(0 <= axis.share(step) <= 1 for step in steps)
    assert 1 <= len(axis.ticks) <= 9


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.787109375, "0.7871"),
        (1234.0, "1,234"),
        (1.5e-5, "1.5e-5"),
        (2e9, "2e9"),
        (0.5, "0.5"),
        (math.nan, "nan"),
        (-2.0, "-2"),
    ],
)
def test_numbers_are_written_short(value: float, text: str) -> None:
    assert short_number(value) == text


@pytest.mark.parametrize(
    ("low", "high", "logarithmic", "labels"),
    [
        (1e-5, 1e-1, True, ("1e-5", "1e-4", "0.001", "0.01", "0.1")),
        (3e-4, 4e-4, True, ("3e-4", "4e-4")),
        (-1.0, 1.0, True, ("-1", "-0.5", "0", "0.5", "1")),
        (0.0, 0.3, False, ("0", "0.05", "0.1", "0.15", "0.2", "0.25", "0.3")),
    ],
)
def test_a_range_that_is_known_reaches_from_end_to_end(
    low: float, high: float, logarithmic: bool, labels: tuple[str, ...]
) -> None:
    axis = range_axis(low, high, logarithmic)
    assert (axis.low, axis.high) == (low, high)
    assert axis.labels == labels
    assert (axis.share(low), axis.share(high)) == (0.0, 1.0)


def test_a_range_of_whole_numbers_has_ticks_at_whole_numbers_alone() -> None:
    assert range_axis(1, 3, whole=True).ticks == (1.0, 2.0, 3.0)


@given(st.tuples(FINITE, FINITE).map(sorted), st.booleans(), st.booleans())
@example([5e-324, 1.7e308], True, False)
@example([0.0, 0.0], True, True)
def test_any_range_has_its_ticks_within_it(ends: list[float], logarithmic: bool, whole: bool) -> None:
    axis = range_axis(ends[0], ends[1], logarithmic, whole)
    assert all(-1e-9 <= axis.share(tick) <= 1 + 1e-9 for tick in axis.ticks)
