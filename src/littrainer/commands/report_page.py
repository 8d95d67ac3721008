"""The page of `littrainer report`: a verdict, tables as HTML, and the data that the page's script draws charts from."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from itertools import chain
from typing import Any

from littrainer.arguments.shown_arguments import away_from_defaults, default_texts, is_same
from littrainer.callbacks.log_history import COSTS, EVALUATION, SPEED_PREFIX, TRAINING, advice_on, shares_of_time
from littrainer.commands.report_charts import (
    ABSENT,
    Chart,
    best_points,
    complete_trials,
    deciding_curve,
    drawn_metrics,
    duration,
    equally_best,
    is_complete,
    less_is_better,
    objective_names,
    ordered_metrics,
    short_number,
    sources_of,
)
from littrainer.commands.report_folders import Run, Search
from littrainer.errors.version import __version__
from littrainer.search.record import FAILED, PRUNED, STATES, StoredSearch, TrialRecord

MOST_ROWS = 500
# A loss that changes by less than this share is called flat.
FLAT = 0.02


class Best(str):
    """The text of a cell that is marked as the best of its row or column."""


# A title, the headings of a table, and its rows.
Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]


def page(
    runs: list[Run],
    searches: Sequence[Search],
    charts: Sequence[Chart],
    live_seconds: int = 0,
    verdict: str = "",
    tables: Sequence[Table] = (),
) -> str:
    """The page on searches and trainings, which needs nothing but itself.

    Parameters:
        verdict: the first line, instead of what came out.
        tables: are shown above the charts.
        live_seconds: the page loads itself again after this time, since it is going to be written again; 0 if not.
    """
    names = list(dict.fromkeys([*(search.name for search in searches), *(run.name for run in runs)]))
    title = names[0] if len(names) == 1 else f"{len(names)} folders compared"
    told: list[Run | Search] = [*searches, *runs]
    notes = [f"{one.name}: {note}" if len(names) > 1 else note for one in told for note in one.notes]
    verdicts = [verdict] if verdict else [*map(verdict_of_search, searches), *([verdict_of_runs(runs)] if runs else [])]
    narrow = ' class="tables"' if len(runs) == 1 else ""
    body = [
        *(f'<p class="verdict">{_as_html(verdict)}</p>' for verdict in verdicts if verdict),
        _tiles(runs[0]) if len(runs) == 1 and not searches else "",
        f"<aside>{'<br>'.join(map(_as_html, notes))}</aside>" if notes else "",
        *(_section(title, _table(headings, rows)) for title, headings, rows in tables),
        '<div id="toolbar"></div>',
        *(
            part
            for place, search in enumerate(searches)
            for part in (_place_of_charts(f"search {place}"), *_search_parts(search, with_name=len(names) > 1))
        ),
        *([_place_of_charts("training"), f"<div{narrow}>", *_training_parts(runs), "</div>"] if runs else ()),
    ]
    data = {
        "title": title,
        "live": live_seconds,
        "runs": [run.name for run in runs],
        "charts": list(map(dataclasses.asdict, charts)),
        "trials": {f"search {place}": _described_trials(search.stored) for place, search in enumerate(searches)},
    }
    sources = [*(search.file for search in searches), *(run.state_file for run in runs)]
    parts = {
        "title": _as_html(title),
        "body": "\n".join(body),
        # No text in it can end the element that it stands in.
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "version": __version__,
        "files": ", ".join(map(_as_html, sources)),
    }
    template = files("littrainer.commands").joinpath("report.html").read_text("utf-8")
    return re.sub(r"@@(\w+)@@", lambda found: parts[found[1]], template)


def _place_of_charts(group: str) -> str:
    return f'<div class="charts" data-group="{group}"></div>'


def _described_trials(search: StoredSearch) -> list[dict[str, Any]]:
    """What is said about each trial at its dot."""
    names = objective_names(search)
    return [
        {
            "name": f"trial {trial.id}, {trial.state}".encode("utf-8", "backslashreplace").decode(),
            "facts": [
                [str(name), _value_text(value)]
                for name, value in [*zip(names, trial.objectives(), strict=False), *trial.parameters.items()]
            ],
        }
        for trial in search.trials
    ]


# ---- The verdict -----------------------------------------------------------------------------------------------------


def verdict_of_runs(runs: list[Run]) -> str:
    """What came out, in one line: of one training its best evaluation and what followed, of several which is best."""
    if len(runs) > 1:
        return _verdict_of_several(runs)
    (run,) = runs
    metric, source = deciding_curve(run)
    best = best_points(run, metric, source)
    losses = run.history.curves.get(("loss", TRAINING), [])
    said = []
    if best:
        steps = [short_number(point.step) for point in best]
        again = f", and equally good {len(steps) - 1} more times" if len(steps) > 2 else ""
        place = " and ".join(steps) if len(steps) == 2 else steps[0]
        said += [f"Best {_called(metric, source)} {short_number(best[0].value)} at step {place}{again}"]
        said += _afterwards(run, source, best[-1].step)
    elif len(losses) > 1:
        first, last = short_number(losses[0].value), short_number(losses[-1].value)
        said += [f"Training loss went from {first} to {last}", "nothing was evaluated"]
    broken = next((point.step for point in losses if not math.isfinite(point.value)), None)
    if broken is not None:
        said.append(f"training loss was nan or infinite at step {short_number(broken)}")
    if run.state.global_step < run.state.max_steps:
        said.append(f"{short_number(run.state.global_step)} of {short_number(run.state.max_steps)} steps are done")
    text = "; ".join(said)
    return text[:1].upper() + text[1:]


def _called(metric: str, source: str) -> str:
    if source == EVALUATION:
        return "evaluation loss" if metric == "loss" else metric
    return f"{metric} on {source}"


def _afterwards(run: Run, source: str, best_step: int) -> list[str]:
    """What the evaluation loss did after the best step."""
    points = [point for point in run.history.curves.get(("loss", source), []) if not point.is_after_training]
    before = [point for point in points if point.step <= best_step and math.isfinite(point.value)]
    after = [point for point in points if point.step > best_step]
    if not before or not after:
        return ["nothing was evaluated later"] if len(points) > 2 and not after else []
    start, end = before[-1].value, after[-1].value
    if not math.isfinite(end):
        return ["evaluation loss nan or infinite afterwards"]
    change = (end - start) / abs(start) if start else math.copysign(math.inf, end) if end else 0.0
    if abs(change) <= FLAT:
        return ["evaluation loss flat afterwards"]
    share = f" by {abs(change):.0%}" if math.isfinite(change) else ""
    return [f"evaluation loss {'rose' if change > 0 else 'fell'}{share} afterwards"]


def _verdict_of_several(runs: list[Run]) -> str:
    metric, source = deciding_curve(runs[0])
    found = [(run, best_points(run, metric, source)) for run in runs]
    reached = {run.name: points[0].value for run, points in found if points}
    if not reached:
        return ""
    less = less_is_better(metric, runs[0])
    best = (min if less else max)(reached.values())
    winners = [name for name, value in reached.items() if value == best]
    others = [f"{name} reached {short_number(value)}" for name, value in reached.items() if value != best]
    equal = ", equally good" if len(winners) > 1 else ""
    text = f"Best {_called(metric, source)} {short_number(best)} by {' and '.join(winners)}{equal}"
    return text + (f"; {', '.join(others[:3])}{' and more' if len(others) > 3 else ''}" if others else "")


def verdict_of_search(search: Search) -> str:
    """The best trials, and for how long nothing better has come."""
    stored = search.stored
    best = equally_best(stored)
    if not best:
        return ""
    trials = " and ".join(f"trial {trial.id}" for trial in best[:3]) + (
        f" and {len(best) - 3} more" if len(best) > 3 else ""
    )
    if len(stored.directions) > 1:
        return f"No trial surpasses {trials} in all objectives"
    text = f"Best {objective_names(stored)[0]} {short_number(best[0].objectives()[0])}: {trials}"
    since = len(stored.trials) - 1 - stored.trials.index(best[0])
    return f"{text}; nothing better in {since} trials since" if since > 1 else text


def _tiles(run: Run) -> str:
    metric, source = deciding_curve(run)
    best, summary = best_points(run, metric, source), run.history.summary
    losses = run.history.curves.get(("loss", TRAINING), [])
    perplexities = [point for point in run.history.curves.get(("perplexity", source), []) if point.value > 0]
    tiles = {
        f"best {_called(metric, source)}": short_number(best[0].value) if best else None,
        "lowest perplexity": short_number(min(point.value for point in perplexities)) if perplexities else None,
        "last training loss": short_number(losses[-1].value) if losses else None,
        "optimizer steps": short_number(run.state.global_step),
        "duration": duration(summary["train_runtime"]) if "train_runtime" in summary else None,
        **{
            f"training {what} per second": short_number(rate)
            for what in ("samples", "tokens")
            if (rate := summary.get(f"train_{what}_per_second"))
        },
    }
    shown = "".join(f"<div><dt>{_as_html(name)}</dt><dd>{text}</dd></div>" for name, text in tiles.items() if text)
    return f"<dl>{shown}</dl>"


# ---- Tables ----------------------------------------------------------------------------------------------------------


def _training_parts(runs: list[Run]) -> Iterable[str]:
    names = [run.name for run in runs]
    drawn = set(drawn_metrics(runs))
    metrics = {metric: metric in drawn for metric in ordered_metrics(runs)[1] if metric not in COSTS}
    rows = [
        *_result_rows(runs),
        *(row for metric, shown in metrics.items() if shown for row in _metric_rows(runs, metric)),
    ]
    yield _section("Results", _table(["", *names], rows))
    others = [row for metric, shown in metrics.items() if not shown for row in _metric_rows(runs, metric)]
    if others:
        yield f"<details><summary>{len(others)} more results</summary>{_table(['', *names], others)}</details>"
    speeds = [_shown_speed(run.history.speed) for run in runs]
    if any(speeds):
        rows = [[name, *(speed.get(name, ABSENT) for speed in speeds)] for name in dict.fromkeys(chain(*speeds))]
        told = advice_on(runs[0].history.speed, runs[0].arguments or {}) if len(runs) == 1 else None
        sentence = f"<p>{_as_html(told)}.</p>" if told else ""
        yield _section("Where the time goes", sentence + _table(["", *names], rows))
    facts = dict.fromkeys(name for run in runs for name in run.environment)
    if facts:
        rows = [[name, *(run.environment.get(name, ABSENT) for run in runs)] for name in facts]
        yield _section("Environment", _table(["", *names], rows))
    known = [run.arguments for run in runs if run.arguments is not None]
    defaults = default_texts()
    changed = dict.fromkeys(name for texts in known for name in away_from_defaults(texts, defaults))
    if len(runs) == 1 and known:
        shown = [[name, known[0][name], defaults.get(name, "not known here")] for name in changed]
        yield _section("Arguments that differ from their defaults", _table(["argument", "value", "default"], shown))
    elif known:
        differing = [
            [name, *((run.arguments or {}).get(name, ABSENT) for run in runs)]
            for name in changed
            if not all(is_same(texts.get(name, ""), known[0].get(name, "")) for texts in known)
        ]
        table = _table(["argument", *names], differing) if differing else "<p>None.</p>"
        yield _section("Arguments that differ", table)


def _shown_speed(logs: dict[str, float]) -> dict[str, str]:
    shares, shown = shares_of_time(logs), {}
    for name, value in logs.items():
        part = name.removeprefix(SPEED_PREFIX).removesuffix("_seconds")
        if part in shares:
            shown[part.replace("_", " ")] = f"{duration(value)} ({shares[part]:.0%})"
        elif part != "seconds_left":
            shown[part.replace("_", " ")] = short_number(value)
    return shown


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
    for source in sources_of(runs):
        curves = [run.history.curves.get((metric, source), []) for run in runs]
        if not any(curves):
            continue
        cells = [short_number(points[-1].value) if points else ABSENT for points in curves]
        if source == TRAINING:
            yield [metric, *cells]
            continue
        best = [best_points(run, metric, source) for run in runs]
        reached = [points[0].value for points in best if points]
        winner = (min if less_is_better(metric, runs[0]) else max)(reached, default=None)
        for place, points in enumerate(best):
            if points and len(curves[place]) > 1:
                extreme = "lowest" if less_is_better(metric, runs[place]) else "highest"
                cells[place] += f" ({extreme} {short_number(points[0].value)} at step {points[0].step})"
            if points and len(reached) > 1 and points[0].value == winner:
                cells[place] = Best(cells[place])
        yield [f"{metric}, {source}", *cells]


def _search_parts(search: Search, with_name: bool) -> Iterable[str]:
    stored = search.stored
    of_which = f" of {search.name}" if with_name else ""
    counts = {state: sum(trial.state == state for trial in stored.trials) for state in STATES}
    seconds = [trial.seconds for trial in stored.trials if trial.seconds is not None]
    best = equally_best(stored)
    facts = [
        ["Backend", f"{stored.backend} {stored.name or ''}"],
        ["Trials", ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "none"],
        ["Time of all trials", duration(sum(seconds)) if seconds else ABSENT],
        ["Best", ", ".join(f"trial {trial.id}" for trial in best) or ABSENT],
        # Of equally good ones the first is what the search returned.
        ["Folder of the best", best[0].folder or ABSENT if best else ABSENT],
    ]
    yield _section(f"Search{of_which}", _table(["", ""], facts))
    ranked = complete_trials(stored)
    rest = sorted(
        (trial for trial in stored.trials if not is_complete(stored, trial)),
        key=lambda trial: STATES.index(trial.state),
    )
    names = list(dict.fromkeys(name for trial in stored.trials for name in trial.parameters))
    rows = [
        [
            Best(f"trial {trial.id}") if trial in best else f"trial {trial.id}",
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
    if is_complete(search, trial):
        return [short_number(value) for value in trial.objectives()]
    said = trial.state
    if trial.state == FAILED and trial.error:
        said = f"{said}: {trial.error}"
    elif trial.state == PRUNED and trial.intermediate:
        step, value = trial.intermediate[-1]
        said = f"{said} with {short_number(value)} at step {step}"
    return [said, *[ABSENT] * (len(search.directions) - 1)]


def _section(title: str, content: str) -> str:
    return f"<section><h2>{_as_html(title)}</h2>{content}</section>"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th scope=col>{_as_html(heading)}</th>" for heading in headings)
    body = "".join(
        f"<tr>{_cell(name, 'th scope=row', 'th')}{''.join(_cell(cell, 'td', 'td') for cell in cells)}</tr>"
        for name, *cells in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    # A wide table is scrolled, by keyboard too.
    return f'<div class="wide" tabindex=0 role=region aria-label="Table">{table}</div>'


def _cell(text: str, opening: str, tag: str) -> str:
    # Long names and paths are broken where a reader would break them.
    shown = re.sub(r"([_/])(?=\w)", r"\1<wbr>", _as_html(text))
    return f"<{opening}{' class=best' if isinstance(text, Best) else ''}>{shown}</{tag}>"


def _as_html(value: Any) -> str:
    # JSON may hold halves of letters, which UTF-8 cannot write.
    return html.escape(str(value).encode("utf-8", "backslashreplace").decode())


def _value_text(value: Any) -> str:
    return short_number(value) if isinstance(value, float) else str(value)
