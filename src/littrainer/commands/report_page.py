"""The page of `littrainer report`: a verdict, tables as HTML, and the data that its script draws as charts."""

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
from littrainer.commands.report_charts import ABSENT, Chart, duration, format_number, split_metrics
from littrainer.commands.report_folders import Run, Search
from littrainer.runtime.version import __version__
from littrainer.search.record import FAILED, PRUNED, STATES, TrialRecord

MAX_ROWS = 500
# A loss that changes by less than this share is called flat.
FLAT = 0.02
# Figures of a single training that are shown in large type too.
LARGE_FIGURES = ("Optimizer steps", "Duration", "Training samples per second", "Training tokens per second")


class Best(str):
    """The text of a cell that is marked as the best of its row or column."""


class Table(NamedTuple):
    """A table of the page.

    Parameters:
        title: its heading.
        headings: of its columns.
        rows: texts of cells; the first one of a row is its heading.
        note: a sentence below it.
        is_folded: whether the rows are shown only on a click.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    is_folded: bool = False


def page(
    runs: list[Run],
    searches: Sequence[Search],
    charts: Sequence[Chart],
    live_seconds: int = 0,
    verdict: str = "",
    tables: Sequence[Table] = (),
) -> str:
    """Return the page on searches and trainings, which needs no other file.

    Parameters:
        live_seconds: after this time the page loads itself again, since it is going to be written again; 0 for never.
        verdict: the first line, instead of the best results.
        tables: shown above the charts.
    """
    names = list(dict.fromkeys([*(search.name for search in searches), *(run.name for run in runs)]))
    title = names[0] if len(names) == 1 else f"{len(names)} folders compared"
    notes = [f"{run.name}: {note}" if len(names) > 1 else note for run in runs for note in run.notes]
    verdicts = [verdict] if verdict else [*map(verdict_of_search, searches), *([verdict_of_runs(runs)] if runs else [])]
    body = [f'<p class="verdict">{_as_html(text)}</p>' for text in verdicts if text]
    if len(runs) == 1 and not searches:
        figures = _large_figures(runs[0]).items()
        body.append(
            f"<dl>{''.join(f'<div><dt>{_as_html(name)}</dt><dd>{text}</dd></div>' for name, text in figures)}</dl>"
        )
    if notes:
        body.append(f"<aside>{'<br>'.join(map(_as_html, notes))}</aside>")
    body += [*map(_section, tables), '<div id="toolbar"></div>']
    for number, search in enumerate(searches):
        body += [_place_of_charts(f"search {number}"), *map(_section, _search_tables(search, len(names) > 1))]
    if runs:
        is_narrow = ' class="tables"' if len(runs) == 1 else ""
        body += [_place_of_charts("training"), f"<div{is_narrow}>", *map(_section, _training_tables(runs)), "</div>"]
    data = {
        "title": title,
        "live": live_seconds,
        "runs": [run.name for run in runs],
        "charts": list(map(dataclasses.asdict, charts)),
        "trials": {f"search {number}": _described_trials(search) for number, search in enumerate(searches)},
    }
    parts = {
        "title": _as_html(title),
        "body": "\n".join(body),
        # No text in it can end the element that holds it.
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "version": __version__,
        "files": ", ".join(map(_as_html, [*(search.file for search in searches), *(run.state_file for run in runs)])),
    }
    template = files("littrainer.commands").joinpath("report.html").read_text("utf-8")
    return re.sub(r"@@(\w+)@@", lambda name: parts[name[1]], template)


# ---- The verdict -----------------------------------------------------------------------------------------------------


def verdict_of_runs(runs: Sequence[Run]) -> str:
    """Return the result of trainings in one line: the best evaluation, and of one training what followed."""
    metric, source = runs[0].deciding_curve
    reached = {run.name: points for run in runs if (points := run.best_points(metric, source))}
    if not reached:
        losses = [format_number(point.value) for point in runs[0].history.curves.get(("loss", TRAINING), [])]
        is_alone = len(runs) == 1 and len(losses) > 1
        return f"Training loss went from {losses[0]} to {losses[-1]}; nothing was evaluated" if is_alone else ""
    best = (min if runs[0].is_less_better(metric) else max)(points[0].value for points in reached.values())
    text = f"Best {_name_of(metric, source)} {format_number(best)}"
    if len(runs) > 1:
        return f"{text} by {' and '.join(name for name, points in reached.items() if points[0].value == best)}"
    points = reached[runs[0].name]
    steps = " and ".join(format_number(point.step) for point in points[:2])
    return f"{text} at step {steps}{_what_followed(runs[0], source, points[-1].step)}"


def _name_of(metric: str, source: str) -> str:
    if source == EVALUATION:
        return "evaluation loss" if metric == "loss" else metric
    return f"{metric} on {source}"


def _what_followed(run: Run, source: str, best_step: int) -> str:
    """Return how the evaluation loss changed after the best step."""
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


def verdict_of_search(search: Search) -> str:
    """Return the best trials in one line."""
    best = search.best
    trials = " and ".join(f"trial {trial.id}" for trial in best[:3])
    if not best:
        return ""
    if len(search.stored.directions) > 1:
        return f"No trial surpasses {trials} in all objectives"
    return f"Best {search.objective_names[0]} {format_number(best[0].objectives()[0])}: {trials}"


# ---- Figures and tables ----------------------------------------------------------------------------------------------


def _figures(run: Run) -> dict[str, str]:
    """Return the figures of a training that are known, by name."""
    state, summary = run.state, run.history.summary

    def show(value: float | None, planned: float = 0) -> str:
        return format_number(value or 0) + (f" of {format_number(planned)}" if planned > 0 and planned != value else "")

    figures = {
        "Optimizer steps": show(state.global_step, state.max_steps),
        "Epochs": show(state.epoch or run.history.last_epoch, state.num_train_epochs),
    }
    if state.best_metric is not None:
        name = (run.arguments or {}).get("metric_for_best_model", "")
        step = "" if run.best_step is None else f" at step {run.best_step}"
        figures["Best evaluation"] = f"{format_number(state.best_metric)} {name}{step}"
    if run.best_checkpoint is not None:
        figures["Best checkpoint"] = run.best_checkpoint
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
            figures[name] = duration(value) if name == "Duration" else format_number(value)
    return figures


def _large_figures(run: Run) -> dict[str, str]:
    metric, source = run.deciding_curve
    best = run.best_points(metric, source)
    losses = run.history.curves.get(("loss", TRAINING), [])
    large = {f"best {_name_of(metric, source)}": format_number(best[0].value)} if best else {}
    if losses:
        large["last training loss"] = format_number(losses[-1].value)
    figures = _figures(run)
    return large | {name.lower(): figures[name] for name in LARGE_FIGURES if name in figures}


def _training_tables(runs: list[Run]) -> Iterator[Table]:
    names = [run.name for run in runs]
    sources: dict[str, list[str]] = {}
    for metric, source in dict.fromkeys(key for run in runs for key in run.history.curves):
        sources.setdefault(metric, []).append(source)
    rows = _rows_of([_figures(run) for run in runs])
    drawn, others = split_metrics(runs)
    rows += [row for metric in drawn if metric not in COSTS for row in _metric_rows(runs, metric, sources[metric])]
    folded = [row for metric in others for row in _metric_rows(runs, metric, sources[metric])]
    yield Table("Results", ["", *names], rows)
    if folded:
        yield Table(f"{len(folded)} more results", ["", *names], folded, is_folded=True)
    advice = suggest_speedup(runs[0].history.speed) if len(runs) == 1 else None
    note = f"{advice}." if advice else ""
    yield Table("Where the time goes", ["", *names], _rows_of([_speed_of(run) for run in runs]), note)
    yield Table("Environment", ["", *names], _rows_of([run.environment for run in runs]))
    known = [run.arguments for run in runs if run.arguments is not None]
    defaults = format_defaults()
    changed = dict.fromkeys(name for texts in known for name in select_non_defaults(texts, defaults))
    if len(runs) == 1 and known:
        shown = [[name, known[0][name], defaults.get(name, "not known here")] for name in changed]
        yield Table("Arguments that differ from their defaults", ["argument", "value", "default"], shown)
    elif known:
        differing = [
            [name, *((run.arguments or {}).get(name, ABSENT) for run in runs)]
            for name in changed
            if not all(is_same(texts.get(name, ""), known[0].get(name, "")) for texts in known)
        ]
        yield Table("Arguments that differ", ["argument", *names], differing, "" if differing else "None.")


def _rows_of(columns: Sequence[dict[str, str]]) -> list[list[str]]:
    """Return a row for each name in a column."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(column.get(name, ABSENT) for column in columns)] for name in names]


def _speed_of(run: Run) -> dict[str, str]:
    logs, speed = run.history.speed, {}
    shares = compute_time_shares(logs)
    for name, value in logs.items():
        part = name.removeprefix(SPEED_PREFIX).removesuffix("_seconds")
        if part in shares:
            speed[part.replace("_", " ")] = f"{duration(value)} ({shares[part]:.0%})"
        elif part != "seconds_left":
            speed[part.replace("_", " ")] = format_number(value)
    return speed


def _metric_rows(runs: list[Run], metric: str, sources: list[str]) -> Iterator[list[str]]:
    """Yield for each source the last value of a metric, with the lowest or highest one of an evaluation."""
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


def _search_tables(search: Search, has_name: bool) -> Iterator[Table]:
    stored, best = search.stored, search.best
    suffix = f" of {search.name}" if has_name else ""
    counts = {state: sum(trial.state == state for trial in stored.trials) for state in STATES}
    seconds = [trial.seconds for trial in stored.trials if trial.seconds is not None]
    facts = [
        ["Backend", f"{stored.backend} {stored.name or ''}"],
        ["Trials", ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "none"],
        ["Time of all trials", duration(sum(seconds)) if seconds else ABSENT],
        ["Best", ", ".join(f"trial {trial.id}" for trial in best) or ABSENT],
        # The search returned the first of equally good trials.
        ["Folder of the best", best[0].folder or ABSENT if best else ABSENT],
    ]
    yield Table(f"Search{suffix}", ["", ""], facts)
    others = [trial for trial in stored.trials if not search.is_complete(trial)]
    ranked = [*search.complete, *sorted(others, key=lambda trial: STATES.index(trial.state))]
    names = list(dict.fromkeys(name for trial in stored.trials for name in trial.parameters))
    rows = [
        [
            Best(f"trial {trial.id}") if trial in best else f"trial {trial.id}",
            *_objective_cells(search, trial),
            *(_value_text(trial.parameters[name]) if name in trial.parameters else ABSENT for name in names),
            ABSENT if trial.seconds is None else duration(trial.seconds),
        ]
        for trial in ranked[:MAX_ROWS]
    ]
    more = len(ranked) - MAX_ROWS
    note = f"{more} more trials are in {search.file}." if more > 0 else ""
    yield Table(f"Trials{suffix}, the best first", ["trial", *search.objective_names, *names, "duration"], rows, note)


def _objective_cells(search: Search, trial: TrialRecord) -> list[str]:
    if search.is_complete(trial):
        return [format_number(value) for value in trial.objectives()]
    text = trial.state
    if trial.state == FAILED and trial.error:
        text = f"{text}: {trial.error}"
    elif trial.state == PRUNED and trial.intermediate:
        step, value = trial.intermediate[-1]
        text = f"{text} with {format_number(value)} at step {step}"
    return [text, *[ABSENT] * (len(search.stored.directions) - 1)]


def _described_trials(search: Search) -> list[dict[str, Any]]:
    """Return the name and the facts of each trial, which are shown at its dot."""
    names = search.objective_names
    return [
        {
            "name": _as_text(f"trial {trial.id}, {trial.state}"),
            "facts": [
                [name, _value_text(value)]
                for name, value in [*zip(names, trial.objectives(), strict=False), *trial.parameters.items()]
            ],
        }
        for trial in search.stored.trials
    ]


# ---- HTML ------------------------------------------------------------------------------------------------------------


def _place_of_charts(group: str) -> str:
    return f'<div class="charts" data-group="{group}"></div>'


def _section(table: Table) -> str:
    note = f"<p>{_as_html(table.note)}</p>" if table.note else ""
    if not table.rows:
        return f"<section><h2>{_as_html(table.title)}</h2>{note}</section>" if note else ""
    head = "".join(f"<th scope=col>{_as_html(heading)}</th>" for heading in table.headings)
    rows = (
        f"<tr>{_cell(name, 'th', ' scope=row')}{''.join(_cell(cell, 'td') for cell in cells)}</tr>"
        for name, *cells in table.rows
    )
    content = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    # A wide table is scrolled, by keyboard too.
    content = f'<div class="wide" tabindex=0 role=region aria-label="Table">{content}</div>{note}'
    if table.is_folded:
        return f"<details><summary>{_as_html(table.title)}</summary>{content}</details>"
    return f"<section><h2>{_as_html(table.title)}</h2>{content}</section>"


def _cell(text: str, tag: str, attributes: str = "") -> str:
    best = " class=best" if isinstance(text, Best) else ""
    # Long names and paths are broken where a reader would break them.
    shown = re.sub(r"([_/])(?=\w)", r"\1<wbr>", _as_html(text))
    return f"<{tag}{attributes}{best}>{shown}</{tag}>"


def _as_html(value: object) -> str:
    return html.escape(_as_text(value))


def _as_text(value: object) -> str:
    # JSON may hold halves of letters, which UTF-8 cannot encode.
    return str(value).encode("utf-8", "backslashreplace").decode()


def _value_text(value: Any) -> str:
    return format_number(value) if isinstance(value, float) else str(value)
