"""What the charts of a search show, before anything is drawn: objectives over trials, and lines across parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from littrainer.report.axes import Axis, range_axis, step_axis, value_axis
from littrainer.report.importance import Importance
from littrainer.report.searches import Parameter, Search, is_sound
from littrainer.search.record import COMPLETE, FAILED, MAXIMIZE, PRUNED, TrialRecord

# More cannot be told apart, and make the page slow.
MOST_POINTS = 2000
MOST_LINES = 300
MOST_AXES = 10
# Below the axis of a parameter that only some trials have.
ABSENT_SHARE = -0.12
ABSENT_LABEL = "not set"
# Lines are coloured by the fifth of the ranking that they belong to.
GRADES = 5


class Spot(NamedTuple):
    """One trial in a chart.

    Parameters:
        trial: its place among the trials of the search.
        x: its number.
        value: its objective, or the last value that a pruned one reported; None where it has none.
        state: how it ended.
    """

    trial: int
    x: int
    value: float | None
    state: str


class ObjectivePanel(NamedTuple):
    """One objective over the trials.

    Parameters:
        title: what the objective is called.
        trials, values: the axes.
        spots: the trials that are shown.
        best: (number of the trial, best objective with it), where it changed; empty with several objectives.
        stars: places of the best trials among the spots' trials.
        maximized: whether more is better.
    """

    title: str
    trials: Axis
    values: Axis
    spots: list[Spot]
    best: list[tuple[int, float]]
    stars: frozenset[int]
    maximized: bool


class Thread(NamedTuple):
    """One trial across all axes of a chart.

    Parameters:
        trial: its place among the trials of the search.
        shares: where it stands on each axis, from 0 to 1; `ABSENT_SHARE` where it has no value.
        grade: from 0 to `GRADES` - 1, which is the best.
        best: whether it is a best one.
    """

    trial: int
    shares: list[float]
    grade: int
    best: bool


class ParallelPanel(NamedTuple):
    """Trials as lines across one axis for each parameter and each objective.

    Parameters:
        names: what the axes are called.
        axes: one for each name, the objectives last.
        incomplete: for each axis whether a trial has no value on it.
        threads: the worst first, so that better ones lie above them.
        left_out: how many parameters and how many trials are not shown.
    """

    names: list[str]
    axes: list[Axis]
    incomplete: list[bool]
    threads: list[Thread]
    left_out: tuple[int, int]


def numbers_of(search: Search) -> list[int]:
    """The numbers of the trials: their ids where these are numbers, else 1, 2, 3, ..."""
    ids = [trial.id for trial in search.trials]
    # Digits of other scripts are decimal too; more digits are no count.
    if len(set(ids)) == len(ids) and all(each.isascii() and each.isdecimal() and len(each) < 10 for each in ids):
        return [int(each) for each in ids]
    return list(range(1, len(ids) + 1))


def objective_panels(search: Search, scale: str) -> list[ObjectivePanel]:
    """One chart for each objective; none where no trial has ended."""
    ended = [trial for trial in search.trials if trial.state in (COMPLETE, PRUNED, FAILED)]
    if not ended:
        return []
    return [_objective_panel(search, number, scale) for number in range(len(search.directions))]


def _objective_panel(search: Search, objective: int, scale: str) -> ObjectivePanel:
    numbers = numbers_of(search)
    spots = [
        Spot(place, numbers[place], _value(trial, objective, len(search.directions)), trial.state)
        for place, trial in enumerate(search.trials)
        if trial.state in (COMPLETE, PRUNED, FAILED)
    ]
    stars = _stars(search)
    better = _steps_of_best(search, objective, spots)
    axis = value_axis([spot.value for spot in spots if spot.value is not None], scale)
    kept = _thinned(spots, stars | {spot.trial for spot in better})
    steps = [(spot.x, spot.value) for spot in better if spot.value is not None]
    several = len(search.directions) > 1
    return ObjectivePanel(
        search.objective_names()[objective],
        step_axis([spot.x for spot in spots]),
        axis,
        kept,
        [] if several else steps,
        frozenset(stars),
        search.directions[objective] == MAXIMIZE,
    )


def _value(trial: TrialRecord, objective: int, directions: int) -> float | None:
    if trial.state == COMPLETE:
        values = trial.objectives()
        return values[objective] if is_sound(trial, directions) else None
    if trial.state == PRUNED and directions == 1 and trial.intermediate:
        value = trial.intermediate[-1][1]
        return value if math.isfinite(value) else None
    return None


def _steps_of_best(search: Search, objective: int, spots: list[Spot]) -> list[Spot]:
    """The trials that were better than all before them."""
    sign = -1.0 if search.directions[objective] == MAXIMIZE else 1.0
    found: list[Spot] = []
    lowest = math.inf
    for spot in spots:
        if spot.state == COMPLETE and spot.value is not None and sign * spot.value < lowest:
            lowest = sign * spot.value
            found.append(spot)
    return found


def _thinned(spots: list[Spot], needed: set[int]) -> list[Spot]:
    every = math.ceil(len(spots) / MOST_POINTS)
    return [spot for place, spot in enumerate(spots) if place % every == 0 or spot.trial in needed]


def _stars(search: Search) -> set[int]:
    best = {id(trial) for trial in search.best()}
    return {place for place, trial in enumerate(search.trials) if id(trial) in best}


def trade_off(search: Search) -> list[tuple[int, float, float]]:
    """(place of the trial, first objective, second objective) of complete trials, where there are two objectives."""
    if len(search.directions) != 2:
        return []
    sound = [place for place, trial in enumerate(search.trials) if trial.state == COMPLETE and is_sound(trial, 2)]
    every = math.ceil(len(sound) / MOST_POINTS)
    stars = _stars(search)
    kept = [place for number, place in enumerate(sound) if number % every == 0 or place in stars]
    return [(place, *_two(search.trials[place])) for place in kept]


def _two(trial: TrialRecord) -> tuple[float, float]:
    first, second = trial.objectives()
    return first, second


def foremost_parameters(parameters: Sequence[Parameter], importance: Importance) -> list[Parameter]:
    """The parameters that are shown, the most important first where that is known."""
    order = {name: place for place, name in enumerate(importance.shares)}
    return sorted(parameters, key=lambda each: order.get(each.name, len(order)))[:MOST_AXES]


def parallel_panel(search: Search, parameters: Sequence[Parameter], shown: Sequence[Parameter]) -> ParallelPanel | None:
    """Complete trials across the shown parameters; None where there are no two trials or no parameter.

    Parameters:
        parameters: all of the search.
        shown: those of them that get an axis.
    """
    ranked = search.ranked()
    if len(ranked) < 2 or not shown:
        return None
    places = {id(trial): place for place, trial in enumerate(search.trials)}
    stars = _stars(search)
    every = math.ceil(len(ranked) / MOST_LINES)
    kept = [rank for rank, trial in enumerate(ranked) if rank % every == 0 or places[id(trial)] in stars][:MOST_LINES]
    columns = list(zip(*[trial.objectives() for trial in ranked], strict=True))
    axes = [range_axis(min(column), max(column)) for column in columns]
    threads = []
    for rank in reversed(kept):
        trial = ranked[rank]
        known = [parameter.share(trial) for parameter in shown]
        shares = [ABSENT_SHARE if share is None else share for share in known]
        shares += [axis.share(value) for axis, value in zip(axes, trial.objectives(), strict=True)]
        best = places[id(trial)] in stars
        grade = GRADES - 1 - rank * GRADES // len(ranked)
        threads.append(Thread(places[id(trial)], shares, grade, best))
    names = [parameter.name for parameter in shown] + search.objective_names()
    incomplete = [any(thread.shares[number] == ABSENT_SHARE for thread in threads) for number in range(len(names))]
    left_out = (len(parameters) - len(shown), len(ranked) - len(kept))
    return ParallelPanel(names, [*(parameter.axis for parameter in shown), *axes], incomplete, threads, left_out)
