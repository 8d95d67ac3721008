"""HTML page of `littrainer report`: a verdict, tables, and data of charts."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from littrainer.arguments.shown_arguments import format_defaults, is_same, select_non_defaults
from littrainer.callbacks.log_history import (
    COSTS,
    EVALUATION,
    SPEED_PREFIX,
    TRAINING,
    compute_time_shares,
    suggest_speedup,
)
from littrainer.checkpoint.layout import TRAINER_STATE_NAME
from littrainer.commands.report_charts import (
    ABSENT,
    Chart,
    format_duration,
    format_number,
    format_value,
    split_metrics,
)
from littrainer.commands.report_folders import Run, Search
from littrainer.runtime.version import __version__
from littrainer.search.record import FAILED, PRUNED, STATES, TrialRecord

MAX_ROWS = 500
# Relative change below which a loss is called flat.
FLAT = 0.02
LARGE_FIGURES = ("Optimizer steps", "Duration", "Training samples per second", "Training tokens per second")


class Best(str):
    """Cell marked as the best of its row or column."""


class Table(NamedTuple):
    """Table of the page.

    Parameters:
        rows: cells; the first is the row's heading.
        note: a sentence below the table.
        is_folded: whether the rows are hidden until a click.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    is_folded: bool = False


def render_page(
    runs: list[Run],
    searches: Sequence[Search],
    charts: Sequence[Chart],
    live_seconds: int = 0,
    verdict: str = "",
    tables: Sequence[Table] = (),
) -> str:
    """Return a self-contained page about searches and trainings.

    Parameters:
        live_seconds: reload interval; 0 for never.
        verdict: first line, instead of the best results.
        tables: tables above the charts.
    """
    names = list(dict.fromkeys([*(search.name for search in searches), *(run.name for run in runs)]))
    title = names[0] if len(names) == 1 else f"{len(names)} folders compared"
    notes = [f"{run.name}: {note}" if len(names) > 1 else note for run in runs for note in run.notes]
    verdicts = [verdict] if verdict else [*map(summarize_search, searches), *([summarize_runs(runs)] if runs else [])]
    body = [f'<p class="verdict">{html.escape(text)}</p>' for text in verdicts if text]
    if len(runs) == 1 and not searches:
        figures = _collect_large_figures(runs[0]).items()
        body.append(
            f"<dl>{''.join(f'<div><dt>{html.escape(name)}</dt><dd>{text}</dd></div>' for name, text in figures)}</dl>"
        )
    if notes:
        body.append(f"<aside>{'<br>'.join(map(html.escape, notes))}</aside>")
    body += [*map(_render_table, tables), '<div id="toolbar"></div>']
    for number, search in enumerate(searches):
        body += [
            _render_chart_container(f"search {number}"),
            *map(_render_table, _build_search_tables(search, len(names) > 1)),
        ]
    if runs:
        is_narrow = ' class="tables"' if len(runs) == 1 else ""
        body += [
            _render_chart_container("training"),
            f"<div{is_narrow}>",
            *map(_render_table, _build_training_tables(runs)),
            "</div>",
        ]
    data = {
        "title": title,
        "live": live_seconds,
        "runs": [run.name for run in runs],
        "charts": list(map(dataclasses.asdict, charts)),
        "trials": {f"search {number}": _describe_trials(search) for number, search in enumerate(searches)},
    }
    read_files = [*(search.file for search in searches), *(run.state_file for run in runs)]
    parts = {
        "title": html.escape(title),
        "body": "\n".join(body),
        # Text must not end the script element.
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "version": __version__,
        "files": html.escape(", ".join(str(file) for file in read_files)),
    }
    template = files("littrainer.commands").joinpath("report.html").read_text("utf-8")
    return re.sub(r"@@(\w+)@@", lambda name: parts[name[1]], template)


# ---- The verdict -----------------------------------------------------------------------------------------------------


def summarize_runs(runs: Sequence[Run]) -> str:
    """Return the best evaluation and, for a single training, the trend after it, in a line."""
    metric, source = runs[0].deciding_curve
    reached = {run.name: points for run in runs if (points := run.best_points(metric, source))}
    if not reached:
        losses = [format_number(point.value) for point in runs[0].history.curves.get(("loss", TRAINING), [])]
        is_alone = len(runs) == 1 and len(losses) > 1
        return f"Training loss went from {losses[0]} to {losses[-1]}; nothing was evaluated" if is_alone else ""
    best = (min if runs[0].is_less_better(metric) else max)(points[0].value for points in reached.values())
    text = f"Best {_format_metric(metric, source)} {format_number(best)}"
    if len(runs) > 1:
        return f"{text} by {' and '.join(name for name, points in reached.items() if points[0].value == best)}"
    points = reached[runs[0].name]
    steps = " and ".join(format_number(point.step) for point in points[:2])
    ending = f"; {runs[0].ending}" if runs[0].ending.startswith("stopped") else ""
    return f"{text} at step {steps}{_describe_trend(runs[0], source, points[-1].step)}{ending}"


def _format_metric(metric: str, source: str) -> str:
    if source == EVALUATION:
        return "evaluation loss" if metric == "loss" else metric
    return f"{metric} on {source}"


def _describe_trend(run: Run, source: str, best_step: int) -> str:
    points = [point for point in run.history.curves.get(("loss", source), []) if not point.is_after_training]
    before = [point for point in points if point.step <= best_step and math.isfinite(point.value)]
    after = [point for point in points if point.step > best_step]
    if not before or not after:
        return "; nothing was evaluated later" if len(points) > 2 and not after else ""
    start, end = before[-1].value, after[-1].value
    if not math.isfinite(end):
        return "; evaluation loss nan or infinite afterwards"
    if abs(end - start) <= FLAT * abs(start):
        return "; evaluation loss flat afterwards"
    share = f" by {abs((end - start) / start):.0%}" if start else ""
    return f"; evaluation loss {'rose' if end > start else 'fell'}{share} afterwards"


def summarize_search(search: Search) -> str:
    best = search.best
    trials = " and ".join(f"trial {trial.id}" for trial in best[:3])
    if not best:
        return ""
    if len(search.stored.directions) > 1:
        return f"No trial surpasses {trials} in all objectives"
    return f"Best {search.objective_names[0]} {format_number(best[0].objectives()[0])}: {trials}"


# ---- Figures and tables ----------------------------------------------------------------------------------------------


def _collect_figures(run: Run) -> dict[str, str]:
    state, summary = run.state, run.history.summary

    def show(value: float | None, planned: float = 0) -> str:
        return format_number(value or 0) + (f" of {format_number(planned)}" if planned > 0 and planned != value else "")

    figures = {} if run.started is None else {"Started": run.started}
    if run.state_file.name == TRAINER_STATE_NAME:
        figures["Ending"] = run.ending
    figures |= {
        "Optimizer steps": show(state.global_step, state.max_steps),
        "Epochs": show(state.epoch or run.history.last_epoch, state.num_train_epochs),
    }
    if state.best_metric is not None:
        name = (run.arguments or {}).get("metric_for_best_model", "")
        step = "" if run.best_step is None else f" at step {run.best_step}"
        figures["Best evaluation"] = f"{format_number(state.best_metric)} {name}{step}"
    if state.best_model_checkpoint is not None:
        figures["Best checkpoint"] = state.best_model_checkpoint
    if run.command is not None:
        figures["Command"] = run.command
    logged = {
        "Mean training loss of the whole run": summary.get("train_loss"),
        "Duration": summary.get("train_runtime"),
        "Training samples per second": summary.get("train_samples_per_second"),
        "Optimizer steps per second": summary.get("train_steps_per_second"),
        "Training tokens per second": summary.get("train_tokens_per_second"),
        "Tokens seen": state.num_input_tokens_seen or None,
        "Floating-point operations": state.total_flos or None,
    }
    for name, value in logged.items():
        if value is not None:
            figures[name] = format_duration(value) if name == "Duration" else format_number(value)
    return figures


def _collect_large_figures(run: Run) -> dict[str, str]:
    metric, source = run.deciding_curve
    best = run.best_points(metric, source)
    losses = run.history.curves.get(("loss", TRAINING), [])
    large = {f"best {_format_metric(metric, source)}": format_number(best[0].value)} if best else {}
    if losses:
        large["last training loss"] = format_number(losses[-1].value)
    figures = _collect_figures(run)
    return large | {name.lower(): figures[name] for name in LARGE_FIGURES if name in figures}


def _build_training_tables(runs: list[Run]) -> Iterator[Table]:
    names = [run.name for run in runs]
    sources: dict[str, list[str]] = {}
    for metric, source in dict.fromkeys(key for run in runs for key in run.history.curves):
        sources.setdefault(metric, []).append(source)
    drawn, remaining = split_metrics(runs)
    shown = [
        row for metric in drawn if metric not in COSTS for row in _build_metric_rows(runs, metric, sources[metric])
    ]
    folded = [row for metric in remaining for row in _build_metric_rows(runs, metric, sources[metric])]
    yield Table("Training", ["", *names], _merge_columns([_collect_figures(run) for run in runs]))
    yield Table("Last value of each metric", ["", *names], shown)
    if folded:
        yield Table(f"{len(folded)} more metrics", ["", *names], folded, is_folded=True)
    yield from _build_argument_tables(runs)
    advice = suggest_speedup(runs[0].history.throughput) if len(runs) == 1 else None
    note = f"{advice}." if advice else ""
    yield Table("Where the time goes", ["", *names], _merge_columns([_format_throughput(run) for run in runs]), note)
    environment = _merge_columns([run.environment for run in runs])
    differing = [row for row in environment if len({*row[1:]}) > 1]
    if differing:
        yield Table("Environment, code and data that differ", ["", *names], differing)
    equal = [row for row in environment if row not in differing]
    if equal:
        title = (
            "Environment, code and data" if len(runs) == 1 else f"{len(equal)} equal rows of environment, code and data"
        )
        yield Table(title, ["", *names], equal, is_folded=True)


def _build_argument_tables(runs: list[Run]) -> Iterator[Table]:
    arguments = [run.arguments for run in runs if run.arguments is not None]
    defaults = format_defaults()
    changed = dict.fromkeys(name for texts in arguments for name in select_non_defaults(texts, defaults))
    if len(runs) == 1 and arguments:
        shown = [[name, arguments[0][name], defaults.get(name, "not known here")] for name in changed]
        yield Table("Arguments that differ from their defaults", ["argument", "value", "default"], shown)
    elif arguments:
        differing = [
            [name, *((run.arguments or {}).get(name, ABSENT) for run in runs)]
            for name in changed
            if not all(is_same(texts.get(name, ""), arguments[0].get(name, "")) for texts in arguments)
        ]
        names = [run.name for run in runs]
        yield Table("Arguments that differ", ["argument", *names], differing, "" if differing else "None.")


def _merge_columns(columns: Sequence[dict[str, str]]) -> list[list[str]]:
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(column.get(name, ABSENT) for column in columns)] for name in names]


def _format_throughput(run: Run) -> dict[str, str]:
    logs, speed = run.history.throughput, {}
    shares = compute_time_shares(logs)
    for name, value in logs.items():
        part = name.removeprefix(SPEED_PREFIX).removesuffix("_seconds")
        if part in shares:
            speed[part.replace("_", " ")] = f"{format_duration(value)} ({shares[part]:.0%})"
        elif part != "seconds_left":
            speed[part.replace("_", " ")] = format_number(value)
    return speed


def _build_metric_rows(runs: list[Run], metric: str, sources: list[str]) -> Iterator[list[str]]:
    """Yield for each source the last value of a metric and, for evaluations, the best value."""
    for source in sorted(sources, key=TRAINING.__ne__):
        curves = [run.history.curves.get((metric, source), []) for run in runs]
        cells = [format_number(points[-1].value) if points else ABSENT for points in curves]
        if source == TRAINING:
            yield [metric, *cells]
            continue
        best = [run.best_points(metric, source) for run in runs]
        reached = [points[0].value for points in best if points]
        winner = (min if runs[0].is_less_better(metric) else max)(reached, default=None)
        for number, points in enumerate(best):
            if points and len(curves[number]) > 1:
                extreme = "lowest" if runs[number].is_less_better(metric) else "highest"
                cells[number] += f" ({extreme} {format_number(points[0].value)} at step {points[0].step})"
            if points and len(reached) > 1 and points[0].value == winner:
                cells[number] = Best(cells[number])
        yield [f"{metric}, {source}", *cells]


def _build_search_tables(search: Search, has_name: bool) -> Iterator[Table]:
    stored, best = search.stored, search.best
    suffix = f" of {search.name}" if has_name else ""
    counts = {state: sum(trial.state == state for trial in stored.trials) for state in STATES}
    seconds = [trial.seconds for trial in stored.trials if trial.seconds is not None]
    facts = [
        ["Backend", f"{stored.backend} {stored.name or ''}"],
        ["Trials", ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "none"],
        ["Time of all trials", format_duration(sum(seconds)) if seconds else ABSENT],
        ["Best", ", ".join(f"trial {trial.id}" for trial in best) or ABSENT],
        # A search returns the first of equally good trials.
        ["Folder of the best", best[0].folder or ABSENT if best else ABSENT],
    ]
    yield Table(f"Search{suffix}", ["", ""], facts)
    incomplete = [trial for trial in stored.trials if not search.is_complete(trial)]
    ranked = [*search.complete, *sorted(incomplete, key=lambda trial: STATES.index(trial.state))]
    names = list(dict.fromkeys(name for trial in stored.trials for name in trial.parameters))
    rows = [
        [
            Best(f"trial {trial.id}") if trial in best else f"trial {trial.id}",
            *_format_objectives(search, trial),
            *(format_value(trial.parameters.get(name, ABSENT)) for name in names),
            ABSENT if trial.seconds is None else format_duration(trial.seconds),
        ]
        for trial in ranked[:MAX_ROWS]
    ]
    more = len(ranked) - MAX_ROWS
    note = f"{more} more trials are in {search.file}." if more > 0 else ""
    yield Table(f"Trials{suffix}, the best first", ["trial", *search.objective_names, *names, "duration"], rows, note)


def _format_objectives(search: Search, trial: TrialRecord) -> list[str]:
    if search.is_complete(trial):
        return [format_number(value) for value in trial.objectives()]
    text = trial.state
    if trial.state == FAILED and trial.error:
        text = f"{text}: {trial.error}"
    elif trial.state == PRUNED and trial.intermediate:
        step, value = trial.intermediate[-1]
        text = f"{text} with {format_number(value)} at step {step}"
    return [text, *[ABSENT] * (len(search.stored.directions) - 1)]


def _describe_trials(search: Search) -> list[dict[str, Any]]:
    names = search.objective_names
    return [
        {
            "name": f"trial {trial.id}, {trial.state}",
            "facts": [
                [name, format_value(value)]
                for name, value in [*zip(names, trial.objectives(), strict=False), *trial.parameters.items()]
            ],
        }
        for trial in search.stored.trials
    ]


# ---- HTML ------------------------------------------------------------------------------------------------------------


def _render_chart_container(group: str) -> str:
    return f'<div class="charts" data-group="{group}"></div>'


def _render_table(table: Table) -> str:
    note = f"<p>{html.escape(table.note)}</p>" if table.note else ""
    if not table.rows:
        return f"<section><h2>{html.escape(table.title)}</h2>{note}</section>" if note else ""
    head = "".join(f"<th scope=col>{html.escape(heading)}</th>" for heading in table.headings)
    rows = (
        f"<tr>{_render_cell(name, 'th', ' scope=row')}{''.join(_render_cell(cell, 'td') for cell in cells)}</tr>"
        for name, *cells in table.rows
    )
    content = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    # Focusable for scrolling by keyboard.
    content = f'<div class="wide" tabindex=0 role=region aria-label="Table">{content}</div>{note}'
    if table.is_folded:
        return f"<details><summary>{html.escape(table.title)}</summary>{content}</details>"
    return f"<section><h2>{html.escape(table.title)}</h2>{content}</section>"


def _render_cell(text: str, tag: str, attributes: str = "") -> str:
    best = " class=best" if isinstance(text, Best) else ""
    shown = re.sub(r"([_/])(?=\w)", r"\1<wbr>", html.escape(text))
    return f"<{tag}{attributes}{best}>{shown}</{tag}>"
