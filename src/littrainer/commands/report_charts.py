"""What the charts of `littrainer report` show: curves of trainings and trials of searches, and a picture of them."""

from __future__ import annotations

import bisect
import io
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from littrainer.callbacks.log_history import COSTS, EVALUATION, SPEED, SPEED_PREFIX, TRAINING, Point
from littrainer.commands.report_folders import Run
from littrainer.search.record import COMPLETE, FAILED, MAXIMIZE, PRUNED, StoredSearch, TrialRecord, best_of

LEARNING_RATE, GRADIENT_NORM = "learning_rate", "grad_norm"
# Metric -> title of its chart; all others go by their own name.
TITLES = {
    "loss": "Loss",
    LEARNING_RATE: "Learning rate",
    GRADIENT_NORM: "Gradient norm before clipping",
    SPEED: "Samples per second of evaluations",
}
# Their zero means something, and a logarithmic axis does not have one.
ALWAYS_LINEAR = (LEARNING_RATE, SPEED)
# So many metrics of evaluations, and so many others, are drawn.
MOST_METRICS = 12
# Less of a metric that ends so is better; of others more is.
LESS_IS_BETTER = ("loss", "perplexity", "error", "wer", "cer", "mae", "mse", "rmse")
# A value axis is logarithmic if the middle nine tenths of its values span this ratio.
LOGARITHMIC_FROM = 100.0
# Charts have no room for larger numbers.
LARGEST = 1e300
MOST_PARAMETERS = 8
TRAINING_AXES = {"step": "optimizer step", "epoch": "epoch", "time": "time, estimated from the mean pace"}
ABSENT = "\N{EN DASH}"


@dataclass
class Series:
    """One curve, or one group of dots.

    Parameters:
        run, source: which training, and where in it the numbers come from; of a search, the state of the trials.
        x: axis -> a number for each point, None where it is not known.
        y: the values; None is a gap, which a cross at the foot of the chart marks.
        look: "line", "dots" or "steps".
        color, dash: which colour and which line style of the palette; a colour of -1 is grey.
        best: which points are the best ones, all of them if several are equal.
        ids: the trial that a point belongs to.
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
    """One chart.

    Parameters:
        group: the charts of a group have one cursor.
        axes: what x can be -> its label.
        zoom: charts with the same name here are zoomed together.
        log, x_log: whether an axis is logarithmic unless the reader chooses.
        is_noisy: whether its curves can be smoothed.
        ticks: the names of x values 0, 1, 2 ... if they are not numbers.
        summary: what the chart shows, in words.
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
    summary: str = ""


# ---- Trainings -------------------------------------------------------------------------------------------------------


def training_charts(runs: list[Run]) -> list[Chart]:
    """The charts of trainings, which are drawn over each other."""
    paces = [seconds_of_steps(run) for run in runs]
    charts = []
    for metric in drawn_metrics(runs):
        series: list[Series] = []
        for number, run in enumerate(runs):
            for place, source in enumerate(sources_of(runs)):
                # One run is coloured by source; several by run, and their sources are line styles.
                color, dash = (place, 0) if len(runs) == 1 else (number, place)
                series += _series(run, metric, source, paces[number], color, dash)
        log = metric not in ALWAYS_LINEAR and _spans_powers(series)
        x_axes = {
            axis: label
            for axis, label in TRAINING_AXES.items()
            if any(x is not None for one in series for x in one.x[axis])
        }
        title = TITLES.get(metric, metric)
        chart = Chart(title, "training", x_axes, series, "training", log, summary=_summary(title, series))
        chart.is_noisy = metric != LEARNING_RATE
        charts.append(chart)
    return charts


def _series(
    run: Run, metric: str, source: str, pace: Callable[[int], float] | None, color: int, dash: int
) -> Iterable[Series]:
    points = run.history.curves.get((metric, source), [])
    best = best_points(run, metric, source) if deciding_curve(run) == (metric, source) else []
    # The evaluation of the best model is no continuation of the curve.
    for is_after in (False, True):
        chosen = [point for point in points if point.is_after_training == is_after]
        if chosen:
            yield Series(
                run.name,
                f"{source}, after training" if is_after else source,
                {
                    "step": [point.step for point in chosen],
                    "epoch": [point.epoch for point in chosen],
                    "time": [None if pace is None else pace(point.step) for point in chosen],
                },
                [_drawable(point.value) for point in chosen],
                "dots" if is_after else "line",
                color,
                dash,
                [number for number, point in enumerate(chosen) if point in best],
            )


def _drawable(value: float) -> float | None:
    return value if math.isfinite(value) and abs(value) < LARGEST else None


def _spans_powers(series: Iterable[Series]) -> bool:
    ordered = sorted(value for one in series for value in one.y if value is not None)
    edge = len(ordered) // 20
    return bool(ordered) and ordered[0] > 0 and ordered[-1 - edge] / ordered[edge] >= LOGARITHMIC_FROM


def _summary(title: str, series: Iterable[Series]) -> str:
    told = []
    for one in series:
        values = [value for value in one.y if value is not None]
        if values:
            name = f"{one.run}, {one.source}"
            told.append(
                f"{name} is {short_number(values[0])}"
                if len(values) == 1
                else f"{name} goes from {short_number(values[0])} to {short_number(values[-1])}, "
                f"between {short_number(min(values))} and {short_number(max(values))}"
            )
    return f"{title}. {'; '.join(told)}."


def seconds_of_steps(run: Run) -> Callable[[int], float] | None:
    """Step -> seconds since the training began, if every step took equally long; evaluations as long as was logged."""
    total, steps = run.history.summary.get("train_runtime"), run.state.global_step
    if not total or not math.isfinite(total) or not steps:
        return None
    costs = sorted(
        (point.step, point.value)
        for (metric, _), points in run.history.curves.items()
        for point in points
        if metric == "runtime" and not point.is_after_training and math.isfinite(point.value)
    )
    ends = [step for step, _ in costs]
    sums = [0.0, *itertools.accumulate(seconds for _, seconds in costs)]
    pace = max(0.0, total - sums[-1]) / steps
    return lambda step: round(pace * step + sums[bisect.bisect_left(ends, step)], 3)


def sources_of(runs: list[Run]) -> list[str]:
    """Where numbers come from: training first, then the evaluation sets in the order of their appearance."""
    return list(dict.fromkeys([TRAINING, *(source for run in runs for _, source in run.history.curves)]))


def ordered_metrics(runs: list[Run]) -> tuple[list[str], list[str]]:
    """Metrics of evaluations, but for the usual ones, and all: the loss, these, the other usual ones, and the rest."""
    logged = dict.fromkeys(metric for run in runs for metric, _ in run.history.curves)
    evaluated = {metric for run in runs for metric, source in run.history.curves if source != TRAINING}
    # Where the time goes has a table.
    others = [metric for metric in logged if metric not in {*TITLES, *COSTS} and not metric.startswith(SPEED_PREFIX)]
    of_evaluations = [metric for metric in others if metric in evaluated]
    order = dict.fromkeys(["loss", *of_evaluations, LEARNING_RATE, GRADIENT_NORM, SPEED, *others])
    return of_evaluations, [metric for metric in order if metric in logged]


def drawn_metrics(runs: list[Run]) -> list[str]:
    """The usual metrics, a dozen of evaluations, the deciding one among them, and a dozen others."""
    of_evaluations, ordered = ordered_metrics(runs)
    others = [metric for metric in ordered if metric not in TITLES and metric not in of_evaluations]
    decides = {deciding_curve(run)[0] for run in runs}
    chosen = {*TITLES, *decides, *of_evaluations[:MOST_METRICS], *others[:MOST_METRICS]}
    return [metric for metric in ordered if metric in chosen]


def deciding_curve(run: Run) -> tuple[str, str]:
    """The metric and the evaluation set that say how good a run is: those of its best model, else the loss."""
    best, step = run.state.best_metric, run.best_step
    evaluated = {key: points for key, points in run.history.curves.items() if key[1] != TRAINING}
    if best is not None:
        for key, points in evaluated.items():
            if any(point.step == step and point.value == best for point in points):
                return key
    losses = [key for key in evaluated if key[0] == "loss"]
    return losses[0] if losses else ("loss", EVALUATION)


def less_is_better(metric: str, run: Run) -> bool:
    """Whether a lower value of a metric is the better one."""
    greater = (run.arguments or {}).get("greater_is_better")
    if run.state.best_metric is not None and greater in ("True", "False") and deciding_curve(run)[0] == metric:
        return greater == "False"
    return metric.endswith(LESS_IS_BETTER)


def best_points(run: Run, metric: str, source: str) -> list[Point]:
    """The best evaluations during training by a metric; several if they are equally good."""
    points = [point for point in run.history.curves.get((metric, source), []) if math.isfinite(point.value)]
    points = [point for point in points if not point.is_after_training] or points
    if not points:
        return []
    values = [point.value for point in points]
    recorded = run.state.best_metric
    extreme = min(values) if less_is_better(metric, run) else max(values)
    best = recorded if recorded in values and deciding_curve(run) == (metric, source) else extreme
    return [point for point in points if point.value == best]


# ---- Searches --------------------------------------------------------------------------------------------------------


def search_charts(search: StoredSearch, group: str) -> list[Chart]:
    """Objectives over trials, against each other, and over the hyperparameters."""
    names = objective_names(search)
    charts = [_over_trials(search, group, place, name) for place, name in enumerate(names)]
    complete = complete_trials(search)
    if len(complete) < 2:
        return charts
    if len(names) == 2:
        series = [
            _dots(search, complete, lambda number, trial: trial.objectives()[0], lambda trial: trial.objectives()[1])
        ]
        title = f"{names[1]} against {names[0]}"
        charts.append(Chart(title, group, {"x": names[0]}, series, f"{group} objectives"))
    for name in varied_parameters(search)[:MOST_PARAMETERS]:
        charts.append(_over_parameter(search, group, name))
    for chart in charts:
        chart.summary = chart.summary or f"{chart.title}, {len(complete)} complete trials"
    return charts


def _dots(
    search: StoredSearch,
    trials: list[TrialRecord],
    x_of: Callable[[int, TrialRecord], float],
    y_of: Callable[[TrialRecord], float],
    state: str = COMPLETE,
    color: int = 0,
) -> Series:
    """One dot for each of these trials, with a mark at the best ones; `x_of` takes the number of a trial too."""
    best = {id(trial) for trial in equally_best(search)}
    numbers = {id(trial): number for number, trial in enumerate(search.trials)}
    ids = [numbers[id(trial)] for trial in trials]
    x = [_drawable(x_of(number, trial)) for number, trial in zip(ids, trials, strict=True)]
    marked = [place for place, trial in enumerate(trials) if id(trial) in best]
    return Series("", state, {"x": x}, [_drawable(y_of(trial)) for trial in trials], "dots", color, 0, marked, ids)


def _over_trials(search: StoredSearch, group: str, objective: int, name: str) -> Chart:
    complete = [trial for trial in search.trials if is_complete(search, trial)]
    pruned = [trial for trial in search.trials if trial.state == PRUNED and trial.intermediate]
    failed = [trial for trial in search.trials if trial.state == FAILED]
    kinds: list[tuple[str, int, list[TrialRecord], Callable[[TrialRecord], float]]] = [
        (COMPLETE, 0, complete, lambda trial: trial.objectives()[objective]),
        (f"{PRUNED}, last value", -1, pruned, lambda trial: trial.intermediate[-1][1]),
        (FAILED, 6, failed, lambda trial: math.nan),
    ]
    series = [
        _dots(search, trials, lambda number, trial: number, y_of, state, color)
        for state, color, trials, y_of in kinds
        if trials
    ]
    if complete and len(search.directions) == 1:
        better = max if search.directions[0] == MAXIMIZE else min
        reached = list(itertools.accumulate((trial.objectives()[0] for trial in complete), better))
        places = [*series[0].ids, len(search.trials) - 1]
        series.insert(0, Series("", "best so far", {"x": [*places]}, [*reached, reached[-1]], "steps", -1))
    direction = "higher" if search.directions[objective] == MAXIMIZE else "lower"
    title = f"{name} over trials ({direction} is better)"
    return Chart(title, group, {"x": "trial"}, series, group, _spans_powers(series))


def _over_parameter(search: StoredSearch, group: str, name: str) -> Chart:
    trials = [trial for trial in complete_trials(search) if name in trial.parameters]
    values = [trial.parameters[name] for trial in trials]
    is_numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    choices = [] if is_numeric else list(dict.fromkeys(map(str, values)))

    def x_of(_: int, trial: TrialRecord) -> float:
        value = trial.parameters[name]
        return value if is_numeric else choices.index(str(value))

    by_powers = any(trial.distributions.get(name, {}).get("log") for trial in trials)
    is_log = is_numeric and bool(values) and by_powers and min(values) > 0
    series = [_dots(search, trials, x_of, lambda trial: trial.objectives()[0])]
    title = f"{objective_names(search)[0]} over {name}"
    return Chart(
        title, group, {"x": name}, series, f"{group} {name}", _spans_powers(series), x_log=is_log, ticks=choices
    )


def objective_names(search: StoredSearch) -> list[str]:
    """What the objectives are called."""
    several = len(search.directions) > 1
    default = [f"objective {number + 1}" if several else "objective" for number in range(len(search.directions))]
    return search.objective_names or default


def is_complete(search: StoredSearch, trial: TrialRecord) -> bool:
    """Whether a trial has all objectives as finite numbers."""
    values = trial.objectives()
    return trial.state == COMPLETE and len(values) == len(search.directions) and all(map(math.isfinite, values))


def complete_trials(search: StoredSearch) -> list[TrialRecord]:
    """The complete trials, the best by the first objective first."""
    sign = -1 if search.directions[0] == MAXIMIZE else 1
    complete = [trial for trial in search.trials if is_complete(search, trial)]
    return sorted(complete, key=lambda trial: sign * trial.objectives()[0])


def equally_best(search: StoredSearch) -> list[TrialRecord]:
    """The best trials: all that reached the best objective, or that none surpasses in several objectives."""
    best = best_of(search.trials, search.directions)
    reached = [trial.objectives() for trial in best]
    return [trial for trial in search.trials if is_complete(search, trial) and trial.objectives() in reached]


def varied_parameters(search: StoredSearch) -> list[str]:
    """The hyperparameters with more than one value, in the order in which trials have them."""
    found = dict.fromkeys((name, repr(value)) for trial in search.trials for name, value in trial.parameters.items())
    return [name for name, count in Counter(name for name, _ in found).items() if count > 1]


# ---- Numbers as text -------------------------------------------------------------------------------------------------


def short_number(value: float) -> str:
    """A number as people write it in a table: 0.7871, 1.5e-05, 12,345."""
    is_whole = math.isfinite(value) and value == int(value)
    return f"{value:,.0f}" if abs(value) < 1e6 and (is_whole or abs(value) >= 1e4) else f"{value:.4g}"


def duration(seconds: float) -> str:
    """A length of time as people say it: 5.05 s, 3 min 20 s, 2 h 5 min, 1 d 3 h."""
    for size, unit, smaller, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if math.isfinite(seconds) and seconds >= size:
            return f"{int(seconds // size)} {unit} {int(seconds % size // smaller)} {small_unit}"
    return f"{seconds:.3g} s"


# ---- The picture -----------------------------------------------------------------------------------------------------

LONGEST_LABEL, MOST_LEGEND_ENTRIES = 60, 32
COLUMNS, CHART_INCHES = 2, (5.8, 3.2)
LINE_STYLES = ("-", "--", ":", "-.")
STYLE: Any = {"axes.grid": True, "axes.grid.axis": "y", "axes.spines.top": False, "axes.spines.right": False}


def picture(charts: Sequence[Chart]) -> bytes:
    """The charts as the bytes of a PNG file, drawn by matplotlib."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = max(1, math.ceil(len(charts) / COLUMNS))
    written = io.BytesIO()
    # A letter that the font does not have is drawn as a box, with a warning.
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure: Any = Figure((COLUMNS * CHART_INCHES[0], rows * CHART_INCHES[1] + 1), layout="constrained", dpi=110)
        grid = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
        for axes, chart in itertools.zip_longest(grid, charts):
            if chart is None:
                axes.set_axis_off()
            else:
                _draw(axes, chart)
        entries = dict(
            entry for axes in grid for entry in zip(*reversed(axes.get_legend_handles_labels()), strict=True)
        )
        labels = list(entries)[:MOST_LEGEND_ENTRIES]
        if labels:
            figure.legend([entries[label] for label in labels], labels, loc="outside lower center", ncols=4)
        figure.savefig(written, format="png", metadata={"Software": "littrainer report"})
    return written.getvalue()


def _draw(axes: Any, chart: Chart) -> None:
    axis, label = next(iter(chart.axes.items()))
    for series in chart.series:
        color = "gray" if series.color < 0 else f"C{series.color % 10}"
        x, y = series.x[axis], [math.nan if value is None else value for value in series.y]
        look = {"marker": "o" if series.look == "dots" or len(y) < 30 else "", "markersize": 4}
        line = "" if series.look == "dots" else LINE_STYLES[series.dash % len(LINE_STYLES)]
        look |= {"drawstyle": "steps-post", "marker": ""} if series.look == "steps" else {}
        name = ", ".join(filter(None, (series.run, series.source)))
        axes.plot(x, y, linestyle=line, color=color, linewidth=1.2, label=_label(name), **look)
        axes.plot([x[place] for place in series.best], [y[place] for place in series.best], "*k", markersize=11)
        gaps = [place for place, value in zip(x, y, strict=True) if math.isnan(value)]
        axes.plot(gaps, [0.03] * len(gaps), "x", color=color, transform=axes.get_xaxis_transform())
    if chart.log:
        axes.set_yscale("log")
    if chart.x_log:
        axes.set_xscale("log")
    if chart.ticks:
        axes.set_xticks(range(len(chart.ticks)), map(_label, chart.ticks))
    axes.set_title(_label(chart.title), loc="left", fontweight="bold")
    axes.set_xlabel(_label(label))


def _label(text: str) -> str:
    text = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    half = LONGEST_LABEL // 2
    text = text if len(text) <= LONGEST_LABEL else f"{text[:half]}...{text[3 - half :]}"
    # matplotlib leaves labels out of a legend that begin with an underscore, and reads formulas between dollar signs.
    return (f" {text}" if text.startswith("_") else text).replace("$", r"\$")
