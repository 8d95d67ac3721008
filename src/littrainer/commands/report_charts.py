"""Charts of `littrainer report`: curves of trainings, trials of searches, and a PNG of them."""

from __future__ import annotations

import io
import itertools
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from littrainer.callbacks.log_history import COSTS, SPEED_PREFIX, THROUGHPUT, TRAINING
from littrainer.commands.report_folders import Run, Search
from littrainer.search.record import COMPLETE, FAILED, MAXIMIZE, PRUNED, TrialRecord

LEARNING_RATE, GRADIENT_NORM = "learning_rate", "grad_norm"
# Metric -> title of its chart.
TITLES = {
    "loss": "Loss",
    LEARNING_RATE: "Learning rate",
    GRADIENT_NORM: "Gradient norm before clipping",
    THROUGHPUT: "Samples per second of evaluations",
}
# Metrics with a meaningful zero.
ALWAYS_LINEAR = (LEARNING_RATE, THROUGHPUT)
MAX_METRICS = 12
MAX_PARAMETERS = 8
# A value axis is logarithmic if the central 90 % of its values span this ratio.
MIN_LOGARITHMIC_RATIO = 100.0
# Larger values are gaps.
MAX_VALUE = 1e300
TRAINING_AXES = {"step": "optimizer step", "epoch": "epoch", "time": "time, estimated from the mean pace"}
ABSENT = "\N{EN DASH}"
GREY, RED = -1, 6


@dataclass
class Series:
    """Curve, or group of dots.

    Parameters:
        run, source: the training, and the source of its numbers; for a search, the state of the trials.
        x: axis -> a number for each point, None if unknown.
        y: the values; None is a gap, marked by a cross at the bottom.
        look: "line", "dots" or "steps".
        color, dash: indices in the palette.
        best: indices of the best points.
        ids: the trial of each point.
    """

    run: str
    source: str
    x: dict[str, list[float | None]]
    y: list[float | None]
    look: str = "line"
    color: int = 0
    dash: int = 0
    best: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)


@dataclass
class Chart:
    """Chart of several series.

    Parameters:
        group, zoom: charts with the same name share a cursor, or are zoomed together.
        axes: choices of x -> their labels.
        log, x_log: whether an axis is logarithmic by default.
        is_noisy: whether to offer smoothing.
        ticks: names of categories, the x values 0, 1, 2 ...
    """

    title: str
    group: str
    axes: dict[str, str]
    series: list[Series]
    zoom: str
    log: bool = False
    x_log: bool = False
    is_noisy: bool = False
    ticks: list[str] = field(default_factory=list)


# ---- Trainings -------------------------------------------------------------------------------------------------------


def build_training_charts(runs: list[Run]) -> list[Chart]:
    sources = dict.fromkeys([TRAINING, *(source for run in runs for _, source in run.history.curves)])
    charts = []
    for metric in split_metrics(runs)[0]:
        series: list[Series] = []
        for number, run in enumerate(runs):
            for index, source in enumerate(sources):
                # Colors distinguish sources of a single run, else runs.
                color, dash = (index, 0) if len(runs) == 1 else (number, index)
                series += _build_series(run, metric, source, color, dash)
        available = {axis for curve in series for axis, x in curve.x.items() if any(value is not None for value in x)}
        charts.append(
            Chart(
                TITLES.get(metric, metric),
                "training",
                {axis: label for axis, label in TRAINING_AXES.items() if axis in available},
                series,
                "training",
                log=metric not in ALWAYS_LINEAR and _should_be_logarithmic(series),
                is_noisy=metric != LEARNING_RATE,
            )
        )
    return charts


def _build_series(run: Run, metric: str, source: str, color: int, dash: int) -> Iterable[Series]:
    points = run.history.curves.get((metric, source), [])
    best = {*run.best_points(metric, source)} if run.deciding_curve == (metric, source) else set()
    # An evaluation of the best model does not continue the curve.
    for is_after, suffix, look in ((False, "", "line"), (True, ", after training", "dots")):
        selected = [point for point in points if point.is_after_training == is_after]
        x: dict[str, list[float | None]] = {
            "step": [point.step for point in selected],
            "epoch": [point.epoch for point in selected],
            "time": [run.estimate_seconds(point.step) for point in selected],
        }
        stars = [index for index, point in enumerate(selected) if point in best]
        values = [_drop_nonfinite(point.value) for point in selected]
        if selected:
            yield Series(run.name, f"{source}{suffix}", x, values, look, color, dash, stars)


def _drop_nonfinite(value: float) -> float | None:
    return value if math.isfinite(value) and abs(value) < MAX_VALUE else None


def _should_be_logarithmic(series: Iterable[Series]) -> bool:
    ordered = sorted(value for curve in series for value in curve.y if value is not None)
    edge = len(ordered) // 20
    return bool(ordered) and ordered[0] > 0 and ordered[-1 - edge] / ordered[edge] >= MIN_LOGARITHMIC_RATIO


def split_metrics(runs: list[Run]) -> tuple[list[str], list[str]]:
    """Return the metrics to draw (usual metrics, and a dozen each of evaluations and training), and the others."""
    logged = dict.fromkeys(metric for run in runs for metric, _ in run.history.curves)
    evaluated = {metric for run in runs for metric, source in run.history.curves if source != TRAINING}
    deciding = {run.deciding_curve[0] for run in runs}
    # The training's throughput has a table.
    custom = [metric for metric in logged if metric not in {*TITLES, *COSTS} and not metric.startswith(SPEED_PREFIX)]
    eval_metrics = [metric for metric in custom if metric in evaluated]
    train_metrics = [metric for metric in custom if metric not in evaluated]
    drawn = {*TITLES, *deciding, *eval_metrics[:MAX_METRICS], *train_metrics[:MAX_METRICS]}
    order = ["loss", *eval_metrics, LEARNING_RATE, GRADIENT_NORM, THROUGHPUT, *train_metrics]
    ordered = [metric for metric in order if metric in logged]
    return [metric for metric in ordered if metric in drawn], [metric for metric in ordered if metric not in drawn]


# ---- Searches --------------------------------------------------------------------------------------------------------


def build_search_charts(search: Search, group: str) -> list[Chart]:
    names, complete = search.objective_names, search.complete
    charts = [_build_trials_chart(search, group, number, name) for number, name in enumerate(names)]
    if len(complete) < 2:
        return charts
    if len(names) == 2:
        x, y = zip(*(trial.objectives() for trial in complete), strict=True)
        title = f"{names[1]} against {names[0]}"
        charts.append(
            Chart(title, group, {"x": names[0]}, [_build_dots(search, complete, x, y)], f"{group} objectives")
        )
    values: dict[str, set[str]] = {}
    for trial in search.stored.trials:
        for name, value in trial.parameters.items():
            values.setdefault(name, set()).add(repr(value))
    varied = [name for name in values if len(values[name]) > 1]
    return charts + [_build_parameter_chart(search, group, name) for name in varied[:MAX_PARAMETERS]]


def _build_dots(
    search: Search,
    trials: list[TrialRecord],
    x: Sequence[float] | None,
    y: Sequence[float],
    state: str = COMPLETE,
    color: int = 0,
) -> Series:
    numbers = {id(trial): number for number, trial in enumerate(search.stored.trials)}
    best = {id(trial) for trial in search.best}
    ids = [numbers[id(trial)] for trial in trials]
    stars = [index for index, trial in enumerate(trials) if id(trial) in best]
    positions = [_drop_nonfinite(value) for value in (ids if x is None else x)]
    return Series("", state, {"x": positions}, [_drop_nonfinite(value) for value in y], "dots", color, 0, stars, ids)


def _get_pruned(search: Search) -> list[TrialRecord]:
    return [trial for trial in search.stored.trials if trial.state == PRUNED and trial.intermediate]


def _build_trials_chart(search: Search, group: str, objective: int, name: str) -> Chart:
    trials, direction = search.stored.trials, search.stored.directions[objective]
    complete = [trial for trial in trials if search.is_complete(trial)]
    pruned = _get_pruned(search)
    failed = [trial for trial in trials if trial.state == FAILED]
    reached = [trial.objectives()[objective] for trial in complete]
    last = [trial.intermediate[-1][1] for trial in pruned]
    dots = [
        _build_dots(search, complete, None, reached),
        _build_dots(search, pruned, None, last, f"{PRUNED}, last value", GREY),
        _build_dots(search, failed, None, [math.nan] * len(failed), FAILED, RED),
    ]
    series = [dot for dot in dots if dot.ids]
    if complete and len(search.stored.directions) == 1:
        best = [*itertools.accumulate(reached, max if direction == MAXIMIZE else min)]
        x: list[float | None] = [*dots[0].ids, len(trials) - 1]
        series.insert(0, Series("", "best so far", {"x": x}, [*best, best[-1]], "steps", GREY))
    title = f"{name} over trials ({'higher' if direction == MAXIMIZE else 'lower'} is better)"
    return Chart(title, group, {"x": "trial"}, series, group, _should_be_logarithmic(series))


def _build_parameter_chart(search: Search, group: str, name: str) -> Chart:
    trials = [trial for trial in search.complete if name in trial.parameters]
    pruned = [trial for trial in _get_pruned(search) if name in trial.parameters]
    values = [trial.parameters[name] for trial in [*trials, *pruned]]
    is_numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    distributions = [trial.distributions.get(name, {}) for trial in trials]
    choices: list[Any] = []
    if not is_numeric or any("choices" in distribution for distribution in distributions):
        # Evenly spaced, as batch sizes of 8, 16 and 32 are on no linear axis.
        choices = sorted({*values}) if is_numeric else list(dict.fromkeys(map(str, values)))
    x = [choices.index(value if is_numeric else str(value)) for value in values] if choices else values
    has_powers = any(distribution.get("log") for distribution in distributions)
    is_log = not choices and has_powers and min(values) > 0
    series = [_build_dots(search, trials, x[: len(trials)], [trial.objectives()[0] for trial in trials])]
    if pruned:
        last = [trial.intermediate[-1][1] for trial in pruned]
        series.append(_build_dots(search, pruned, x[len(trials) :], last, f"{PRUNED}, last value", GREY))
    title, log = f"{search.objective_names[0]} over {name}", _should_be_logarithmic(series)
    return Chart(title, group, {"x": name}, series, f"{group} {name}", log, x_log=is_log, ticks=[*map(str, choices)])


# ---- Numbers as text -------------------------------------------------------------------------------------------------


def format_number(value: float) -> str:
    """Return a number for a table: 0.7871, 1.5e-05, 12,345."""
    is_integer = math.isfinite(value) and value == int(value)
    return f"{value:,.0f}" if abs(value) < 1e6 and (is_integer or abs(value) >= 1e4) else f"{value:.4g}"


def format_value(value: Any) -> str:
    return format_number(value) if isinstance(value, float) else str(value)


def format_duration(seconds: float) -> str:
    """Return a readable duration: 5.05 s, 3 min 20 s, 2 h 5 min, 1 d 3 h."""
    for size, unit, smaller, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if math.isfinite(seconds) and seconds >= size:
            return f"{int(seconds // size)} {unit} {int(seconds % size // smaller)} {small_unit}"
    return f"{seconds:.3g} s"


# ---- PNG -------------------------------------------------------------------------------------------------------------

MAX_LABEL_CHARACTERS = 60
COLUMNS, CHART_INCHES = 2, (5.8, 3.2)
LINE_STYLES = ("-", "--", ":", "-.")
STYLE: Any = {
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,
}


def render_png(charts: Sequence[Chart]) -> bytes:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = max(1, math.ceil(len(charts) / COLUMNS))
    file = io.BytesIO()
    # matplotlib warns of characters that the font lacks.
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure: Any = Figure((COLUMNS * CHART_INCHES[0], rows * CHART_INCHES[1] + 1), layout="constrained", dpi=110)
        grid = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
        legend: dict[str, Any] = {}
        for axes, chart in itertools.zip_longest(grid, charts):
            if chart is None:
                axes.set_axis_off()
                continue
            _draw(axes, chart)
            handles, labels = axes.get_legend_handles_labels()
            legend |= dict(zip(labels, handles, strict=True))
        if legend:
            figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=4)
        figure.savefig(file, format="png", metadata={"Software": "littrainer report"})
    return file.getvalue()


def _draw(axes: Any, chart: Chart) -> None:
    axis, label = next(iter(chart.axes.items()))
    for series in chart.series:
        color = "gray" if series.color == GREY else f"C{series.color % 10}"
        x, y = series.x[axis], [math.nan if value is None else value for value in series.y]
        axes.plot(
            x,
            y,
            linestyle="" if series.look == "dots" else LINE_STYLES[series.dash % len(LINE_STYLES)],
            drawstyle="steps-post" if series.look == "steps" else "default",
            marker="o" if series.look == "dots" or (series.look == "line" and len(y) < 30) else "",
            markersize=4,
            color=color,
            linewidth=1.2,
            label=", ".join(filter(None, (series.run, series.source)))[:MAX_LABEL_CHARACTERS],
        )
        axes.plot([x[index] for index in series.best], [y[index] for index in series.best], "*k", markersize=11)
        gaps = [position for position, value in zip(x, y, strict=True) if math.isnan(value)]
        axes.plot(gaps, [0.03] * len(gaps), "x", color=color, transform=axes.get_xaxis_transform())
    if chart.log:
        axes.set_yscale("log")
    if chart.x_log:
        axes.set_xscale("log")
    if chart.ticks:
        axes.set_xticks(range(len(chart.ticks)), [choice[:MAX_LABEL_CHARACTERS] for choice in chart.ticks])
    axes.set_title(chart.title[:MAX_LABEL_CHARACTERS], loc="left", fontweight="bold")
    axes.set_xlabel(label[:MAX_LABEL_CHARACTERS])
