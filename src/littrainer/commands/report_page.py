"""The page and the picture of `littrainer report`: charts by matplotlib, tables as HTML."""

from __future__ import annotations

import base64
import functools
import html
import io
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from string import Template
from typing import Any

from littrainer.arguments.shown_arguments import away_from_defaults, default_texts, is_same
from littrainer.callbacks.log_history import COSTS, SPEED, TRAINING, Point
from littrainer.commands.report_folders import Run, Search
from littrainer.errors.version import __version__
from littrainer.search.record import COMPLETE, FAILED, MAXIMIZE, PRUNED, STATES, StoredSearch, TrialRecord, best_of

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
# Less of a metric that ends so is better; of others the highest value is shown.
LESS_IS_BETTER = ("loss", "perplexity", "error", "wer", "cer", "mae", "mse", "rmse")
# A value axis is logarithmic if the middle nine tenths of its values span this ratio.
LOGARITHMIC_FROM = 100.0
# With more points than this a curve has no markers, which would cover it.
MOST_MARKED = 30
MOST_LEGEND_ENTRIES, MOST_PARAMETERS, MOST_ROWS = 32, 8, 500
LONGEST_LABEL = 60
LINE_STYLES, MARKERS = ("-", "--", ":", "-."), "os^Dv"
COLUMNS, CHART_INCHES, HEADER_INCHES = 2, (5.8, 3.2), 1.0
STYLE: Any = {
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "font.size": 9.0,
    "grid.alpha": 0.4,
}
ABSENT = "\N{EN DASH}"


# A title, and what draws the chart on the axes of matplotlib that it is given.
Chart = tuple[str, Callable[[Any], None]]


# ---- The picture -----------------------------------------------------------------------------------------------------


def picture(runs: list[Run], searches: Sequence[Search]) -> bytes:
    """The charts of searches, and below them those of trainings, as the bytes of a PNG file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    parts = [(search.name, _search_charts(search.stored)) for search in searches]
    if runs:
        parts.append((runs[0].name if len(runs) == 1 else f"{len(runs)} trainings", _training_charts(runs)))
    rows = [max(1, math.ceil(len(charts) / COLUMNS)) for _, charts in parts]
    heights = [count * CHART_INCHES[1] + HEADER_INCHES for count in rows]
    written = io.BytesIO()
    # A letter that the font does not have is drawn as a box, with a warning.
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure: Any = Figure(figsize=(COLUMNS * CHART_INCHES[0], sum(heights)), layout="constrained", dpi=110)
        figures = figure.subfigures(len(parts), 1, height_ratios=heights, squeeze=False)[:, 0]
        for part, (title, charts), count in zip(figures, parts, rows, strict=True):
            part.suptitle(_label(title), fontsize=13, fontweight="bold")
            grid = part.subplots(count, COLUMNS, squeeze=False).flatten()
            for axes, (name, draw) in zip(grid, charts, strict=False):
                axes.set_title(_label(name))
                draw(axes)
            for axes in grid[len(charts) :]:
                axes.set_axis_off()
            entries = {
                label: line for axes in grid for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
            }
            labels = list(entries)[:MOST_LEGEND_ENTRIES]
            if labels:
                part.legend(
                    [entries[label] for label in labels], labels, loc="outside lower center", ncols=4, frameon=False
                )
        figure.savefig(written, format="png", metadata={"Software": "littrainer report"})
    return written.getvalue()


def _training_charts(runs: list[Run]) -> list[Chart]:
    return [
        (TITLES.get(metric, metric), functools.partial(_draw_metric, metric=metric, runs=runs))
        for metric in _drawn_metrics(runs)
    ]


def _draw_metric(axes: Any, metric: str, runs: list[Run]) -> None:
    drawn: list[float] = []
    for number, run in enumerate(runs):
        for place, source in enumerate(_sources(runs)):
            points = run.history.curves.get((metric, source), [])
            # One run is coloured by source; several by run, and their sources are line styles.
            look, style, label = (place, 0, source) if len(runs) == 1 else (number, place, f"{run.name}, {source}")
            marker = MARKERS[look % len(MARKERS)] if len(points) <= MOST_MARKED else ""
            line = {"color": f"C{look % 10}", "linestyle": LINE_STYLES[style % len(LINE_STYLES)], "marker": marker}
            steps = [point.step for point in points]
            values = [point.value if _is_drawable(point.value) else math.nan for point in points]
            if points:
                axes.plot(steps, values, **line, markersize=4, linewidth=1.2, label=_label(label))
            missing = [step for step, value in zip(steps, values, strict=True) if math.isnan(value)]
            # Crosses at the foot of the chart, whatever its scale is.
            axes.plot(missing, [0.03] * len(missing), "x", color=line["color"], transform=axes.get_xaxis_transform())
            best = _best_point(run, source, points)
            if best is not None:
                axes.plot([best.step], [best.value], "*", color="black", markersize=12, label="best", zorder=5)
            drawn += [value for value in values if not math.isnan(value)]
    if metric not in ALWAYS_LINEAR:
        _set_scale(axes, drawn)
    axes.set_xlabel("optimizer step")
    axes.locator_params(axis="x", integer=True)


def _set_scale(axes: Any, values: list[float]) -> None:
    ordered = sorted(values)
    edge = len(ordered) // 20
    if ordered and ordered[0] > 0 and ordered[-1 - edge] / ordered[edge] >= LOGARITHMIC_FROM:
        axes.set_yscale("log")


def _is_drawable(value: float) -> bool:
    # matplotlib's margins go beyond what a float holds if the values come near to it.
    return math.isfinite(value) and abs(value) < 1e300


def _best_point(run: Run, source: str, points: list[Point]) -> Point | None:
    best = run.state.best_metric
    if source == TRAINING or best is None:
        return None
    return next((point for point in points if point.step == run.best_step and point.value == best), None)


def _sources(runs: list[Run]) -> list[str]:
    """Where numbers come from: training first, then the evaluation sets in the order of their appearance."""
    return list(dict.fromkeys([TRAINING, *(source for run in runs for _, source in run.history.curves)]))


def _ordered_metrics(runs: list[Run]) -> tuple[list[str], list[str]]:
    """Those of evaluations, but for the usual ones, and all: the loss, these, the other usual ones, and the rest."""
    logged = dict.fromkeys(metric for run in runs for metric, _ in run.history.curves)
    evaluated = {metric for run in runs for metric, source in run.history.curves if source != TRAINING}
    others = [metric for metric in logged if metric not in TITLES and metric not in COSTS]
    of_evaluations = [metric for metric in others if metric in evaluated]
    order = dict.fromkeys(["loss", *of_evaluations, LEARNING_RATE, GRADIENT_NORM, SPEED, *others])
    return of_evaluations, [metric for metric in order if metric in logged]


def _drawn_metrics(runs: list[Run]) -> list[str]:
    """The usual metrics, a dozen of evaluations, the deciding one among them, and a dozen others."""
    of_evaluations, ordered = _ordered_metrics(runs)
    others = [metric for metric in ordered if metric not in TITLES and metric not in of_evaluations]
    curves = [(run, *key, points) for run in runs for key, points in run.history.curves.items()]
    decides = {metric for run, metric, source, points in curves if _best_point(run, source, points) is not None}
    chosen = {*TITLES, *decides, *of_evaluations[:MOST_METRICS], *others[:MOST_METRICS]}
    return [metric for metric in ordered if metric in chosen]


def _search_charts(search: StoredSearch) -> list[Chart]:
    names = objective_names(search)
    charts: list[Chart] = []
    for place, (name, direction) in enumerate(zip(names, search.directions, strict=True)):
        better = "higher" if direction == MAXIMIZE else "lower"
        charts.append(
            (
                f"{name} over trials ({better} is better)",
                functools.partial(_over_trials, search=search, objective=place),
            )
        )
    if len(complete_trials(search)) < 2:
        return charts
    if len(names) == 2:
        charts.append((f"{names[1]} against {names[0]}", functools.partial(_trade_off, search=search)))
    for name in varied_parameters(search)[:MOST_PARAMETERS]:
        charts.append((f"{names[0]} over {name}", functools.partial(_over_parameter, search=search, name=name)))
    return charts


def _over_trials(axes: Any, search: StoredSearch, objective: int) -> None:
    sign = -1.0 if search.directions[objective] == MAXIMIZE else 1.0
    best_ids = {id(trial) for trial in best_of(search.trials, search.directions)}
    spots: dict[str, list[tuple[int, float]]] = {"complete": [], "pruned, last value": [], "best": []}
    failed: list[int] = []
    so_far: list[tuple[int, float]] = []
    for number, trial in enumerate(search.trials):
        if trial.state == COMPLETE and _is_complete(search, trial):
            value = trial.objectives()[objective]
            spots["best" if id(trial) in best_ids else "complete"].append((number, value))
            if not so_far or sign * value < sign * so_far[-1][1]:
                so_far.append((number, value))
        elif trial.state == PRUNED and trial.intermediate and _is_drawable(trial.intermediate[-1][1]):
            spots["pruned, last value"].append((number, trial.intermediate[-1][1]))
        elif trial.state == FAILED:
            failed.append(number)
    if so_far and len(search.directions) == 1:
        reached = [*so_far, (len(search.trials) - 1, so_far[-1][1])]
        axes.step(*zip(*reached, strict=True), where="post", color="gray", linewidth=1, label="best so far")
    for (label, points), style in zip(spots.items(), ("oC0", "sC7", "*k"), strict=True):
        if points:
            axes.plot(*zip(*points, strict=True), style, markersize=12 if label == "best" else 5, label=label)
    if failed:
        axes.plot(failed, [0.03] * len(failed), "xC3", transform=axes.get_xaxis_transform(), label="failed")
    _set_scale(axes, [value for points in spots.values() for _, value in points])
    axes.set_xlabel("trial")
    axes.locator_params(axis="x", integer=True)


def _trade_off(axes: Any, search: StoredSearch) -> None:
    best = {id(trial) for trial in best_of(search.trials, search.directions)}
    for trial in complete_trials(search):
        axes.plot(*([value] for value in trial.objectives()), "*k" if id(trial) in best else "oC0")
    axes.set_xlabel(_label(objective_names(search)[0]))


def _over_parameter(axes: Any, search: StoredSearch, name: str) -> None:
    trials = [trial for trial in complete_trials(search) if name in trial.parameters]
    values = [trial.parameters[name] for trial in trials]
    is_numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    shown = values if is_numeric else [_label(str(value)) for value in values]
    axes.plot(shown, [trial.objectives()[0] for trial in trials], "oC0", alpha=0.7)
    by_powers = any(trial.distributions.get(name, {}).get("log") for trial in trials)
    if is_numeric and by_powers and min(values) > 0:
        axes.set_xscale("log")
    axes.set_xlabel(_label(name))


def _label(text: str) -> str:
    text = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    half = LONGEST_LABEL // 2
    text = text if len(text) <= LONGEST_LABEL else f"{text[:half]}...{text[3 - half :]}"
    # matplotlib leaves labels out of a legend that begin with an underscore, and reads formulas between dollar signs.
    return (f" {text}" if text.startswith("_") else text).replace("$", r"\$")


# ---- Searches --------------------------------------------------------------------------------------------------------


def objective_names(search: StoredSearch) -> list[str]:
    """What the objectives are called."""
    several = len(search.directions) > 1
    default = [f"objective {number + 1}" if several else "objective" for number in range(len(search.directions))]
    return search.objective_names or default


def _is_complete(search: StoredSearch, trial: TrialRecord) -> bool:
    values = trial.objectives()
    return trial.state == COMPLETE and len(values) == len(search.directions) and all(map(math.isfinite, values))


def complete_trials(search: StoredSearch) -> list[TrialRecord]:
    """The trials that have all objectives as finite numbers, the best by the first objective first."""
    sign = -1 if search.directions[0] == MAXIMIZE else 1
    complete = [trial for trial in search.trials if _is_complete(search, trial)]
    return sorted(complete, key=lambda trial: sign * trial.objectives()[0])


def varied_parameters(search: StoredSearch) -> list[str]:
    """The hyperparameters with more than one value, in the order in which trials have them."""
    values: dict[str, set[str]] = {}
    for trial in search.trials:
        for name, value in trial.parameters.items():
            values.setdefault(name, set()).add(repr(value))
    return [name for name, found in values.items() if len(found) > 1]


# ---- The page --------------------------------------------------------------------------------------------------------


def page(runs: list[Run], searches: Sequence[Search], drawn: bytes) -> str:
    """The page on searches and trainings, which needs nothing but itself.

    Parameters:
        drawn: the picture, which the page shows.
    """
    names = list(dict.fromkeys([*(search.name for search in searches), *(run.name for run in runs)]))
    title = names[0] if len(names) == 1 else f"{len(names)} folders compared"
    told: list[Run | Search] = [*searches, *runs]
    notes = [f"{one.name}: {note}" if len(told) > 1 else note for one in told for note in one.notes]
    body = [
        f"<aside>{'<br>'.join(map(_as_html, notes))}</aside>" if notes else "",
        f'<img alt="charts" src="data:image/png;base64,{base64.b64encode(drawn).decode()}">',
        *(part for search in searches for part in _search_parts(search, with_name=len(told) > 1)),
        *(_training_parts(runs) if runs else ()),
    ]
    sources = [*(search.file for search in searches), *(run.state_file for run in runs)]
    template = Template(files("littrainer.commands").joinpath("report.html").read_text("utf-8"))
    return template.substitute(
        title=_as_html(title),
        body="\n".join(body),
        version=__version__,
        files=", ".join(map(_as_html, sources)),
    )


def _training_parts(runs: list[Run]) -> Iterable[str]:
    names = [run.name for run in runs]
    drawn = set(_drawn_metrics(runs))
    metrics = {metric: metric in drawn for metric in _ordered_metrics(runs)[1] if metric not in COSTS}
    rows = [
        *_result_rows(runs),
        *(row for metric, shown in metrics.items() if shown for row in _metric_rows(runs, metric)),
    ]
    yield _section("Results", _table(["", *names], rows))
    others = [row for metric, shown in metrics.items() if not shown for row in _metric_rows(runs, metric)]
    if others:
        yield f"<details><summary>{len(others)} more results</summary>{_table(['', *names], others)}</details>"
    known = [run for run in runs if run.arguments is not None]
    defaults = default_texts()
    changed = [away_from_defaults(run.arguments or {}, defaults) for run in known]
    if len(runs) == 1 and known:
        shown = [[name, value, defaults.get(name, "not known here")] for name, value in changed[0].items()]
        yield _section("Arguments away from their defaults", _table(["argument", "value", "default"], shown))
    elif known:
        differing = [
            [name, *((run.arguments or {}).get(name, ABSENT) for run in runs)]
            for name in dict.fromkeys(name for values in changed for name in values)
            if not all(
                is_same((run.arguments or {}).get(name, ""), (known[0].arguments or {}).get(name, "")) for run in known
            )
        ]
        yield _section(
            "Arguments that differ", _table(["argument", *names], differing) if differing else "<p>None.</p>"
        )


def _result_rows(runs: list[Run]) -> list[list[str]]:
    def best(run: Run) -> str:
        if run.state.best_metric is None:
            return ABSENT
        name = (run.arguments or {}).get("metric_for_best_model", "")
        step = "" if run.best_step is None else f" at step {run.best_step}"
        return f"{short_number(run.state.best_metric)} {name}{step}"

    def of(done: float | None, planned: float) -> str:
        return short_number(done or 0) + (f" of {short_number(planned)}" if planned > 0 and planned != done else "")

    def logged(name: str, shown: Callable[[float], str] = short_number) -> Callable[[Run], str]:
        return lambda run: shown(run.history.summary[name]) if name in run.history.summary else ABSENT

    rows: dict[str, Callable[[Run], str]] = {
        "Optimizer steps": lambda run: of(run.state.global_step, run.state.max_steps),
        "Epochs": lambda run: of(run.state.epoch or run.history.last_epoch, run.state.num_train_epochs),
        "Best evaluation": best,
        "Best checkpoint": lambda run: run.best_checkpoint or ABSENT,
        "Mean training loss of the whole run": logged("train_loss"),
        "Duration of training": logged("train_runtime", duration),
        "Training samples per second": logged("train_samples_per_second"),
        "Optimizer steps per second": logged("train_steps_per_second"),
        "Training tokens per second": logged("train_tokens_per_second"),
        "Tokens seen": lambda run: short_number(run.state.num_input_tokens_seen or math.nan),
        "Floating-point operations": lambda run: short_number(run.state.total_flos or math.nan),
    }
    cells = {name: [shown(run) for run in runs] for name, shown in rows.items()}
    return [[name, *values] for name, values in cells.items() if not set(values) <= {ABSENT, "nan"}]


def _metric_rows(runs: list[Run], metric: str) -> Iterable[list[str]]:
    """For each source the last value of a metric, with the lowest or highest one of an evaluation."""
    for source in _sources(runs):
        curves = [run.history.curves.get((metric, source), []) for run in runs]
        if any(curves):
            yield [
                metric if source == TRAINING else f"{metric}, {source}",
                *(_last(metric, source, curve) for curve in curves),
            ]


def _last(metric: str, source: str, points: list[Point]) -> str:
    if not points:
        return ABSENT
    last = short_number(points[-1].value)
    finite = [point for point in points if math.isfinite(point.value)]
    if source == TRAINING or len(finite) < 2:
        return last
    less = metric.endswith(LESS_IS_BETTER)
    extreme = (min if less else max)(finite, key=lambda point: point.value)
    return f"{last} ({'lowest' if less else 'highest'} {short_number(extreme.value)} at step {extreme.step})"


def _search_parts(search: Search, with_name: bool) -> Iterable[str]:
    stored = search.stored
    of_which = f" of {search.name}" if with_name else ""
    counts = {state: sum(trial.state == state for trial in stored.trials) for state in STATES}
    seconds = [trial.seconds for trial in stored.trials if trial.seconds is not None]
    best = best_of(stored.trials, stored.directions)
    facts = [
        ["Backend", f"{stored.backend} {stored.name or ''}"],
        ["Trials", ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "none"],
        ["Time of all trials", duration(sum(seconds)) if seconds else ABSENT],
        ["Best", ", ".join(f"trial {trial.id}" for trial in best) or ABSENT],
    ]
    yield _section(f"Search{of_which}", _table(["", ""], facts))
    if len(best) == 1:
        rows = [
            [name, _value_text(value), as_range(best[0].distributions.get(name, {}))]
            for name, value in best[0].parameters.items()
        ]
        folder = f"<p>Its folder: {_as_html(best[0].folder)}</p>" if best[0].folder else ""
        yield _section(
            f"Best trial{of_which}: {best[0].id}", folder + _table(["parameter", "value", "searched in"], rows)
        )
    ranked = complete_trials(stored)
    rest = sorted(
        (trial for trial in stored.trials if not _is_complete(stored, trial)),
        key=lambda trial: STATES.index(trial.state),
    )
    names = list(dict.fromkeys(name for trial in stored.trials for name in trial.parameters))
    rows = [
        [
            f"trial {trial.id}",
            *_objective_cells(stored, trial),
            *(_value_text(trial.parameters[name]) if name in trial.parameters else ABSENT for name in names),
            ABSENT if trial.seconds is None else duration(trial.seconds),
        ]
        for trial in [*ranked, *rest][:MOST_ROWS]
    ]
    more = len(stored.trials) - MOST_ROWS
    note = f"<p>{more} more trials are in {_as_html(search.file)}.</p>" if more > 0 else ""
    headings = ["trial", *objective_names(stored), *names, "duration"]
    yield _section(f"Trials{of_which}, the best first", _table(headings, rows) + note)


def _objective_cells(search: StoredSearch, trial: TrialRecord) -> list[str]:
    if _is_complete(search, trial):
        return [short_number(value) for value in trial.objectives()]
    said = trial.state
    if trial.state == FAILED and trial.error:
        said = f"{said}: {trial.error}"
    elif trial.state == PRUNED and trial.intermediate:
        step, value = trial.intermediate[-1]
        said = f"{said} with {short_number(value)} at step {step}"
    return [said, *[ABSENT] * (len(search.directions) - 1)]


def as_range(drawn: dict[str, Any]) -> str:
    """What a hyperparameter was drawn from, in words."""
    if "choices" in drawn:
        return ", ".join(map(str, drawn["choices"]))
    if not {"low", "high"} <= drawn.keys():
        return ABSENT
    return f"{_value_text(drawn['low'])} to {_value_text(drawn['high'])}{', by powers' if drawn.get('log') else ''}"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{_as_html(title)}</h2>{content}</section>"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th scope=col>{_as_html(heading)}</th>" for heading in headings)
    body = "".join(
        f"<tr><th scope=row>{_as_html(name)}</th>{''.join(f'<td>{_as_html(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _as_html(value: Any) -> str:
    # JSON may hold halves of letters, which UTF-8 cannot write.
    return html.escape(str(value).encode("utf-8", "backslashreplace").decode())


def _value_text(value: Any) -> str:
    return short_number(value) if isinstance(value, float) else str(value)


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
