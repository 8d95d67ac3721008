"""The part of the page that shows a hyperparameter search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from littrainer.report.axes import short_number
from littrainer.report.elements import breakable, section, table_of, tiles_of
from littrainer.report.importance import Importance, importance_of
from littrainer.report.labels import as_html, name_as_html, shortened, writable
from littrainer.report.search_panels import (
    GRADES,
    MOST_AXES,
    ObjectivePanel,
    foremost_parameters,
    objective_panels,
    parallel_panel,
    trade_off,
)
from littrainer.report.search_svg import objective_chart, parallel_chart, spot_sample, trade_off_chart
from littrainer.report.searches import Parameter, Search, parameters_of
from littrainer.report.tables import NOTHING, Cell, Table, duration
from littrainer.search.record import COMPLETE, FAILED, PRUNED, STATES, TrialRecord

# So many rows of the table of trials, the best of them first; the record holds all.
MOST_ROWS = 500
# So many trials tell their parameters under the pointer.
MOST_TOLD = 2000


def search_sections(searches: Sequence[Search], scale: str, headed: bool) -> Iterable[str]:
    """The elements on each search.

    Parameters:
        scale: of the axes of objectives: `auto`, `linear` or `log`.
        headed: whether each gets a heading of its own.
    """
    for number, search in enumerate(searches):
        heading = f"<h2 class=part>{name_as_html(search.name)}</h2>" if headed else ""
        yield f'<div class=search data-search="{number}">{heading}{"".join(_parts(search, scale))}</div>'


def _parts(search: Search, scale: str) -> Iterable[str]:
    parameters = parameters_of(search)
    weighed = [importance_of(search, parameters, number) for number in range(len(search.directions))]
    shown = foremost_parameters(parameters, weighed[0])
    yield tiles_of(_tiles(search))
    figures = [_objective_figure(panel, search) for panel in objective_panels(search, scale)]
    figures += _trade_off_figure(search)
    figures += [_importance_figure(search, number, found) for number, found in enumerate(weighed)]
    if any(figures):
        yield f"<section class=charts>{''.join(figures)}{_parallel_figure(search, parameters, shown)}</section>"
    yield from _best_section(search, parameters)
    if search.trials:
        yield section("Trials, the best first", table_of(trials_table(search, shown), emphasise_first=True))
        yield from _left_out(search, parameters)


def _tiles(search: Search) -> Iterable[tuple[str, str, str]]:
    best = search.best()
    if best and len(search.directions) == 1:
        value = short_number(best[0].objectives()[0])
        direction = "highest" if search.directions[0] == "maximize" else "lowest"
        yield f"best {search.objective_names()[0]}", value, f"{direction}, in trial {shortened(best[0].id)}"
    elif best:
        yield "best trials", f"{len(best)}", "that no other one surpasses"
    counts = {state: sum(trial.state == state for trial in search.trials) for state in STATES}
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    yield "trials", f"{len(search.trials):,}", told
    seconds = [trial.seconds for trial in search.trials if trial.seconds is not None]
    if seconds:
        yield "time of all trials", duration(sum(seconds)), f"{duration(sum(seconds) / len(seconds))} each"
    yield "backend", shortened(search.stored.backend), shortened(search.stored.name or "")


def _objective_figure(panel: ObjectivePanel, search: Search) -> str:
    states = {spot.state for spot in panel.spots}
    kinds = [state for state in (COMPLETE, PRUNED, FAILED) if state in states]
    kinds += (["best"] if panel.stars else []) + (["best so far"] if panel.best else [])
    several = len(search.directions) > 1
    words = {
        PRUNED: "pruned" if several else "pruned, its last value",
        "best": "surpassed by none" if several else "best",
    }
    legend = "".join(f"<li>{spot_sample(kind)}{words.get(kind, kind)}</li>" for kind in kinds)
    remarks = [f"{'higher' if panel.maximized else 'lower'} is better", "log scale" if panel.values.logarithmic else ""]
    remark = f" <small>{', '.join(filter(None, remarks))}</small>"
    return (
        f"<figure class=trials><figcaption><h2>{name_as_html(panel.title)} over trials{remark}</h2></figcaption>"
        f"<ul class=legend>{legend}</ul>{objective_chart(panel)}</figure>"
    )


def _trade_off_figure(search: Search) -> Iterable[str]:
    points = trade_off(search)
    if len(points) < 2:
        return
    names = search.objective_names()
    best = {id(trial) for trial in search.best()}
    stars = frozenset(place for place, *_ in points if id(search.trials[place]) in best)
    legend = f"<li>{spot_sample(COMPLETE)}complete</li><li>{spot_sample('best')}surpassed by none</li>"
    yield (
        f"<figure class=trials><figcaption><h2>{name_as_html(names[1])} against {name_as_html(names[0])}</h2>"
        f"</figcaption><ul class=legend>{legend}</ul>{trade_off_chart(points, stars, names)}</figure>"
    )


def _importance_figure(search: Search, number: int, found: Importance) -> str:
    if not found.shares and not found.remark:
        return ""
    several = len(search.directions) > 1
    whose = f" for {name_as_html(search.objective_names()[number])}" if several else ""
    caption = f"<figcaption><h2>Importance of parameters{whose}"
    if not found.shares:
        return f"<figure>{caption}</h2></figcaption><p class=why>{as_html(found.remark)}</p></figure>"
    highest = max(found.shares.values()) or 1.0
    bars = "".join(
        f"<li><span>{breakable(name)}</span><span class=bar><i style='width:{100 * share / highest:.1f}%'></i></span>"
        f"<span>{share:.2f}</span></li>"
        for name, share in list(found.shares.items())[:MOST_AXES]
    )
    return (
        f"<figure>{caption} <small>{as_html(found.remark)}</small></h2></figcaption><ol class=bars>{bars}</ol></figure>"
    )


def _parallel_figure(search: Search, parameters: Sequence[Parameter], shown: Sequence[Parameter]) -> str:
    panel = parallel_panel(search, parameters, shown)
    if panel is None:
        return ""
    less, fewer = panel.left_out
    told = [f"{less} more parameters in the record" if less else "", f"{fewer} more trials" if fewer else ""]
    remark = ", ".join(filter(None, told))
    grades = "".join(f'<i class="g{grade}"></i>' for grade in range(GRADES))
    legend = f"<li>worse<span class=grades>{grades}</span>better</li><li>{_best_line()}best</li>"
    return (
        "<figure class='trials across'><figcaption><h2>Complete trials across their parameters"
        f"{f' <small>{as_html(remark)}</small>' if remark else ''}</h2></figcaption>"
        f"<ul class=legend>{legend}</ul><div class=scroll>{parallel_chart(panel)}</div></figure>"
    )


def _best_line() -> str:
    line = '<g class="thread best-thread"><polyline points="1,6 29,6"/></g>'
    return f'<svg viewBox="0 0 30 12" aria-hidden="true">{line}</svg>'


def _best_section(search: Search, parameters: Sequence[Parameter]) -> Iterable[str]:
    best = search.best()
    if len(best) != 1 or not best[0].parameters:
        return
    ranges = {parameter.name: parameter.text() for parameter in parameters}
    rows = [
        [Cell(name), Cell(shortened(str(value))), Cell(ranges.get(name, "always this"))]
        for name, value in list(best[0].parameters.items())[:MOST_ROWS]
    ]
    folder = f"<p class=path>{as_html(best[0].folder)}</p>" if best[0].folder else ""
    table = Table(["hyperparameter", "value", "searched"], rows)
    yield section(f"Best trial: {shortened(best[0].id)}", folder + table_of(table))


def trials_table(search: Search, shown: Sequence[Parameter]) -> Table:
    """The trials: complete ones first, the best of them at the top, then pruned, failed and running ones.

    Parameters:
        shown: the parameters that get a column.
    """
    ranked = search.ranked()
    known = {id(trial) for trial in ranked}
    others = [trial for trial in search.trials if id(trial) not in known]
    trials = ranked + sorted(others, key=lambda trial: STATES.index(trial.state))
    best = {id(trial) for trial in search.best()}
    names = search.objective_names()
    rows = [
        [
            Cell(f"trial {trial.id}", "best" if id(trial) in best else ""),
            *_objective_cells(trial, len(names)),
            *[_parameter_cell(trial, parameter.name) for parameter in shown],
            NOTHING if trial.seconds is None else Cell(duration(trial.seconds)),
        ]
        for trial in trials[:MOST_ROWS]
    ]
    return Table(["trial", *names, *(parameter.name for parameter in shown), "duration"], rows)


def _objective_cells(trial: TrialRecord, count: int) -> list[Cell]:
    values = trial.objectives()
    if trial.state == COMPLETE and len(values) == count:
        return [Cell(short_number(value)) for value in values]
    said = Cell(trial.state)
    if trial.state == FAILED and trial.error:
        said = Cell(trial.state, trial.error)
    elif trial.state == PRUNED and trial.intermediate:
        step, value = trial.intermediate[-1]
        said = Cell(trial.state, f"{short_number(value)} at step {step}")
    return [said, *[NOTHING] * (count - 1)]


def _parameter_cell(trial: TrialRecord, name: str) -> Cell:
    return Cell(value_text(trial.parameters[name])) if name in trial.parameters else NOTHING


def value_text(value: Any) -> str:
    """A hyperparameter's value in a table."""
    return short_number(value) if isinstance(value, float) else shortened(str(value))


def _left_out(search: Search, parameters: Sequence[Parameter]) -> Iterable[str]:
    rest = len(search.trials) - MOST_ROWS
    told = [f"{rest} more trials" if rest > 0 else ""]
    told += [f"{len(parameters) - MOST_AXES} more parameters" if len(parameters) > MOST_AXES else ""]
    if any(told):
        yield f"<p class=why>{' and '.join(filter(None, told))} are in {as_html(search.file)}.</p>"


def trials_data(searches: Sequence[Search]) -> list[Any]:
    """What the page's script tells of the trial under the pointer, for each search."""
    return [
        {
            str(place): [
                f"trial {shortened(writable(trial.id))}, {trial.state}",
                [[shortened(name), value] for name, value in _told(search, trial)],
            ]
            for place, trial in enumerate(search.trials[:MOST_TOLD])
        }
        for search in searches
    ]


def _told(search: Search, trial: TrialRecord) -> Iterable[tuple[str, str]]:
    values = trial.objectives()
    if len(values) == len(search.directions):
        yield from zip(search.objective_names(), map(short_number, values), strict=True)
    elif trial.intermediate:
        yield f"at step {trial.intermediate[-1][0]}", short_number(trial.intermediate[-1][1])
    for name, value in list(trial.parameters.items())[:MOST_AXES]:
        yield name, value_text(value)
