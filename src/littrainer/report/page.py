"""The report as one HTML page that needs nothing beside itself."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

from littrainer import __version__
from littrainer.report import svg
from littrainer.report.axes import short_number
from littrainer.report.elements import section, table_of, tiles_of
from littrainer.report.history import TRAINING
from littrainer.report.labels import as_html, name_as_html, shortened
from littrainer.report.panels import Entry, Panel, foremost_metrics, legend, panels_of
from littrainer.report.reading import Run
from littrainer.report.search_page import search_sections, trials_data
from littrainer.report.searches import Search
from littrainer.report.svg import COLOURS, Frame, frames_of
from littrainer.report.tables import (
    best_metric_name,
    changed_arguments,
    differing_arguments,
    duration,
    further_results,
    results,
)

# By this mark a report is known as one of ours, and may be written again.
MARK = "littrainer report"


def page(runs: list[Run], scale: str = "auto", searches: Sequence[Search] = ()) -> str:
    """The page on one run, or on several beside each other, and on searches.

    Parameters:
        runs: at least one where there is no search.
        scale: of the charts' value axes: `auto`, `linear` or `log`.
        searches: shown above the runs, one after the other.
    """
    panels = panels_of(runs)
    frames = frames_of(panels, scale)
    title = heading_of(runs, searches)
    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Nothing is loaded, and no script runs but ours, whatever stands in the files that are reported on.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    body = [
        _header(runs, searches, title),
        _notes(runs, searches),
        *search_sections(searches, scale, headed=len(searches) > 1),
        *(_training_parts(runs, panels, frames, headed=bool(searches)) if runs else ()),
        f"<footer>Written by littrainer {as_html(__version__)} from {_sources(runs, searches)}.</footer>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="generator" content="{MARK}">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{as_html(title)} - training report</title>\n<style>\n{_asset('page.css')}</style>\n</head>\n<body>\n"
        f"<main>\n{''.join(body)}\n</main>\n"
        f'<script type="application/json" id="charts">{_harmless(_data(panels, frames))}</script>\n'
        f"{_trials(searches)}"
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return files(__package__ or "littrainer.report").joinpath(name).read_text("utf-8")


def heading_of(runs: Sequence[Run], searches: Sequence[Search]) -> str:
    """What a report is called."""
    names = list(dict.fromkeys([*(search.name for search in searches), *(run.name for run in runs)]))
    if len(names) == 1:
        return names[0]
    counts = [(len(searches), "searches" if len(searches) > 1 else "search")]
    counts += [(len(runs), "trainings" if len(runs) > 1 else "training")]
    told = " and ".join(f"{count} {what}" for count, what in counts if count)
    return told if searches else f"{told} compared"


def _header(runs: list[Run], searches: Sequence[Search], title: str) -> str:
    files = [str(search.file) for search in searches] + [str(run.state_file) for run in runs]
    kind = "Hyperparameter search" if searches else "Training report" if len(runs) == 1 else "Comparison"
    place = f"<p class=path>{as_html(files[0])}</p>" if len(files) == 1 else ""
    return f"<header><p class=kind>{kind}</p><h1>{as_html(title)}</h1>{place}</header>"


def _training_parts(runs: list[Run], panels: list[Panel], frames: list[Frame], headed: bool) -> Iterable[str]:
    if headed:
        yield f"<h2 class=part>{'Training' if len(runs) == 1 else 'Trainings'}</h2>"
    yield _tiles(runs[0]) if len(runs) == 1 else _runs_legend(runs)
    yield _charts(panels, frames, runs)
    yield section("Results", table_of(results(runs), emphasise_first=True))
    yield from _further_results(runs)
    yield from _argument_sections(runs)


def _notes(runs: list[Run], searches: Sequence[Search]) -> str:
    several = len(runs) > 1 or len(searches) > 1
    named = [(search.name, search.notes) for search in searches] + [(run.name, run.notes) for run in runs]
    notes = [f"{name}: {note}" if several else note for name, told in named for note in told]
    empty = [run.name for run in runs if not run.history.curves]
    if empty:
        whose = f" of {', '.join(empty)}" if several else ""
        notes.insert(
            0,
            f"Nothing was logged that could be drawn: the history{whose} has no metrics. Was training shorter than "
            "logging_steps, or logging_strategy 'no'?",
        )
    if not notes:
        return ""
    return f"<aside><ul>{''.join(f'<li>{as_html(note)}</li>' for note in notes)}</ul></aside>"


def _tiles(run: Run) -> str:
    state, summary = run.state, run.history.summary
    losses = run.history.curves.get(("loss", TRAINING), [])
    tiles = [
        ("optimizer steps", f"{state.global_step:,}", f"{short_number(state.epoch)} epochs" if state.epoch else "")
    ]
    if losses:
        tiles.append(("training loss", short_number(losses[-1].value), f"last logged, at step {losses[-1].step:,}"))
    if state.best_metric is not None:
        name = best_metric_name(run) or "metric"
        step = "" if run.best_step is None else f"at step {run.best_step:,}"
        tiles.append((f"best {name}", short_number(state.best_metric), step))
    if "train_runtime" in summary:
        speed = summary.get("train_samples_per_second")
        told = "" if speed is None else f"{short_number(speed)} samples per second"
        tiles.append(("duration of training", duration(summary["train_runtime"]), told))
    return tiles_of(tiles)


def _runs_legend(runs: list[Run]) -> str:
    entries = [
        f'<button type=button class="run c{number % COLOURS}" data-run="{number}" aria-pressed=true>'
        f"<span class=swatch></span>{name_as_html(run.name)}</button>"
        for number, run in enumerate(runs)
    ]
    return f"<nav class=runs aria-label=runs>{''.join(entries)}</nav>"


def _legend_entry(entry: Entry) -> str:
    run = "" if entry.run is None else f' data-run="{entry.run}"'
    return f"<li{run}>{svg.sample(entry)}<span>{name_as_html(entry.label)}</span></li>"


def _charts(panels: list[Panel], frames: list[Frame], runs: list[Run]) -> str:
    foremost = foremost_metrics(runs)
    shown: list[str] = []
    others: list[str] = []
    for number, (panel, frame) in enumerate(zip(panels, frames, strict=True)):
        place = shown if panel.metric in foremost else others
        place.append(_figure(number, panel, frame, runs))
    drawn = f"<section class=charts>{''.join(shown)}</section>" if shown else ""
    if others:
        drawn += (
            f"<details><summary>{len(others)} more charts</summary>"
            f"<section class=charts>{''.join(others)}</section></details>"
        )
    return drawn


def _figure(number: int, panel: Panel, frame: Frame, runs: list[Run]) -> str:
    remarks = ", ".join(filter(None, [panel.unit, "log scale" if frame.values.logarithmic else ""]))
    unit = f" <small>{as_html(remarks)}</small>" if remarks else ""
    entries = "".join(_legend_entry(entry) for entry in legend(panel.curves, runs))
    if any(curve.best is not None for curve in panel.curves):
        entries += f"<li>{svg.star_sample()}best</li>"
    return (
        f'<figure data-chart="{number}"><figcaption><h2>{name_as_html(panel.title)}{unit}</h2></figcaption>'
        f"<ul class=legend>{entries}</ul>{svg.chart(panel, frame)}</figure>"
    )


def _further_results(runs: list[Run]) -> Iterable[str]:
    further = further_results(runs)
    if further.rows:
        yield f"<details><summary>{len(further.rows)} more results</summary>{table_of(further, True)}</details>"


def _argument_sections(runs: list[Run]) -> Iterable[str]:
    if all(run.stored is None for run in runs):
        return
    if len(runs) == 1:
        yield section("Arguments away from their defaults", table_of(changed_arguments(runs)))
        return
    differing = differing_arguments(runs)
    yield section("Arguments that differ", table_of(differing, none="No argument differs."))
    common = changed_arguments(runs, but=differing)
    if common.rows:
        summary = "Arguments that all share, away from their defaults"
        yield f"<details><summary>{summary}</summary>{table_of(common)}</details>"


def _sources(runs: list[Run], searches: Sequence[Search]) -> str:
    files = [search.file for search in searches] + [run.state_file for run in runs]
    return ", ".join(map(as_html, files))


def _data(panels: list[Panel], frames: list[Frame]) -> Any:
    """What the page's script needs to tell the values under the pointer."""
    return [
        {
            "x": [frame.steps.low, frame.steps.high],
            "plot": [svg.LEFT, svg.TOP, svg.PLOT_WIDTH, svg.PLOT_HEIGHT],
            "curves": [
                {
                    "run": curve.run,
                    "label": shortened(curve.label),
                    "colour": curve.look.colour % COLOURS,
                    "points": [
                        [point.step, short_number(point.value), None if point.epoch is None else _epoch(point.epoch)]
                        for point in svg.thinned(curve.points, frame)
                    ],
                }
                for curve in panel.curves
            ],
        }
        for panel, frame in zip(panels, frames, strict=True)
    ]


def _trials(searches: Sequence[Search]) -> str:
    if not searches:
        return ""
    return f'<script type="application/json" id="trials">{_harmless(trials_data(searches))}</script>\n'


def _harmless(data: Any) -> str:
    """JSON that stands within a script element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    # Within a script element only these could end it, or begin a comment.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _epoch(epoch: float) -> str:
    return f"{epoch:.2f}" if math.isfinite(epoch) else str(epoch)
