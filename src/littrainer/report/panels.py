"""Which charts a report has, and which curves each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from littrainer.report.history import COSTS, SPEED, TRAINING, Point
from littrainer.report.reading import Run

LEARNING_RATE = "learning_rate"
GRADIENT_NORM = "grad_norm"
USUAL = ("loss", LEARNING_RATE, GRADIENT_NORM, SPEED)
# Metric -> title and unit of its chart; all others go by their own name.
TITLES: dict[str, tuple[str, str]] = {
    "loss": ("Loss", ""),
    LEARNING_RATE: ("Learning rate", ""),
    GRADIENT_NORM: ("Gradient norm", "before clipping"),
    SPEED: ("Speed of evaluations", "samples per second"),
}
# So many metrics of evaluations, and so many others, are shown before one asks for the rest.
MOST_FOREMOST = 12
# Their zero means something, so a logarithmic axis would hide it.
ALWAYS_LINEAR = frozenset({LEARNING_RATE, SPEED})


class Look(NamedTuple):
    """How a curve is told from the others, by more than its colour.

    Parameters:
        colour: its place in the palette.
        dash: its place among the line styles; 0 is a solid line.
        marker: its place among the markers.
    """

    colour: int
    dash: int
    marker: int


@dataclass(frozen=True)
class Curve:
    """One line of a chart.

    Parameters:
        run: the place of its run among those of the report.
        source: `TRAINING`, or which evaluation set.
        label: what tells it from the others of the chart.
        points: in the order of their steps, with finite and other values.
        best: the point of the best evaluation, where this is the metric that decides.
    """

    run: int
    source: str
    label: str
    look: Look
    points: list[Point]
    best: Point | None = None


@dataclass(frozen=True)
class Panel:
    """One chart: a metric over the optimizer steps."""

    metric: str
    title: str
    unit: str
    curves: list[Curve]


def panels_of(runs: list[Run]) -> list[Panel]:
    """The charts, one for each metric."""
    return [_panel(metric, runs) for metric in ordered_metrics(runs)]


def ordered_metrics(runs: list[Run]) -> list[str]:
    """The loss, the other evaluation metrics, learning rate, gradient norm, speed, and what else was logged."""
    metrics = dict.fromkeys(metric for run in runs for metric in run.history.metrics())
    evaluated = evaluated_metrics(runs)
    hidden = COSTS - {SPEED}
    others = [metric for metric in metrics if metric not in USUAL and metric not in hidden]
    order = ["loss", *(metric for metric in others if metric in evaluated), LEARNING_RATE, GRADIENT_NORM, SPEED]
    order += [metric for metric in others if metric not in evaluated]
    return [metric for metric in order if metric in metrics]


def foremost_metrics(runs: list[Run]) -> set[str]:
    """What is shown at once: the usual metrics, a dozen of evaluations, the deciding one among them, a dozen others."""
    named = ordered_metrics(runs)
    decides = {
        metric
        for run in runs
        for (metric, source), points in run.history.curves.items()
        if _best(run, source, points) is not None
    }
    evaluated = evaluated_metrics(runs)
    further = [metric for metric in named if metric not in USUAL]
    of_evaluations = sorted((metric for metric in further if metric in evaluated), key=lambda name: name not in decides)
    others = [metric for metric in further if metric not in evaluated]
    return {*USUAL, *of_evaluations[:MOST_FOREMOST], *others[:MOST_FOREMOST]}


def evaluated_metrics(runs: list[Run]) -> set[str]:
    """The metrics that an evaluation logged."""
    return {metric for run in runs for metric, source in run.history.curves if source != TRAINING}


def _panel(metric: str, runs: list[Run]) -> Panel:
    sources = list(dict.fromkeys(source for run in runs for name, source in run.history.curves if name == metric))
    # The same source has the same look in every chart, whichever others are there.
    places = {source: place for place, source in enumerate(all_sources(runs))}
    curves = []
    for number, run in enumerate(runs):
        for source in sources:
            points = run.history.curves.get((metric, source))
            if not points:
                continue
            place = places[source]
            alone = len(runs) == 1
            look = Look(place, 0, place) if alone else Look(number, place, number)
            parts = [] if alone else [run.name]
            parts += [source] if alone or len(sources) > 1 else []
            curves.append(Curve(number, source, ", ".join(parts), look, points, _best(run, source, points)))
    title, unit = TITLES.get(metric, (metric, ""))
    return Panel(metric, title, unit, curves)


class Entry(NamedTuple):
    """One line of a legend.

    Parameters:
        label: what it says.
        colour, marker: their places; None where the entry is about the line style alone.
        dash: the place of the line style.
        run: the place of the run that it is about; None where it is about all.
    """

    label: str
    colour: int | None
    dash: int
    marker: int | None
    run: int | None = None


def legend(curves: list[Curve], runs: list[Run]) -> list[Entry]:
    """What tells curves apart: with one run the sources, with several the runs by colour and the sources by line."""
    if len(runs) == 1:
        looks = dict.fromkeys((curve.source, curve.look) for curve in curves)
        return [Entry(source, look.colour, look.dash, look.marker) for source, look in looks]
    shown = dict.fromkeys(curve.run for curve in curves)
    entries = [Entry(runs[number].name, number, 0, number, number) for number in sorted(shown)]
    sources = dict.fromkeys((curve.source, curve.look.dash) for curve in curves)
    if len({dash for _, dash in sources}) > 1:
        entries += [Entry(source, None, dash, None) for source, dash in sources]
    return entries


def all_sources(runs: list[Run]) -> list[str]:
    """Where numbers come from: training first, then the evaluation sets in the order of their appearance."""
    found = dict.fromkeys(source for run in runs for _, source in run.history.curves)
    return [TRAINING, *(source for source in found if source != TRAINING)]


def _best(run: Run, source: str, points: list[Point]) -> Point | None:
    if source == TRAINING or run.state.best_metric is None:
        return None
    return next(
        (point for point in points if point.step == run.best_step and point.value == run.state.best_metric), None
    )
