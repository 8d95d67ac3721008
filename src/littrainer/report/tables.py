"""The tables of a report, as plain rows: results, and the arguments of the runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from littrainer.report.axes import short_number
from littrainer.report.history import COSTS, TRAINING, Point
from littrainer.report.panels import all_sources, foremost_metrics, ordered_metrics
from littrainer.report.reading import Run
from littrainer.report.stored_arguments import same

ABSENT = "\N{EN DASH}"
# Endings of metrics of which less is better; for others the highest value is told.
LESS_IS_BETTER = ("loss", "perplexity", "error", "wer", "cer", "mae", "mse", "rmse")


class Cell(NamedTuple):
    """What a cell says, and a remark beneath it."""

    text: str
    remark: str = ""


@dataclass(frozen=True)
class Table:
    """A heading above each column, and rows whose first cell says what the row is about."""

    headings: list[str]
    rows: list[list[Cell]]


NOTHING = Cell(ABSENT)


def results(runs: list[Run]) -> Table:
    """How far each run came, its foremost metrics at the end, its best evaluation and its speed."""
    rows = [
        _row("Optimizer steps", runs, lambda run: _of(run.state.global_step, run.state.max_steps)),
        _row("Epochs", runs, lambda run: _of(_epochs(run), run.state.num_train_epochs)),
        _row("Best evaluation", runs, _best),
        _row("Best checkpoint", runs, lambda run: Cell(run.best_checkpoint) if run.best_checkpoint else NOTHING),
        *_metric_rows(runs, foremost=True),
        *[
            _row(label, runs, lambda run, name=name, unit=unit: _from_summary(run, name, unit))
            for label, name, unit in SUMMARY
        ],
        _row("Tokens seen", runs, lambda run: _count(run.state.num_input_tokens_seen)),
        _row("Floating-point operations", runs, lambda run: _count(run.state.total_flos)),
    ]
    told = [row for row in rows if any(cell != NOTHING for cell in row[1:])]
    return Table(["", *(run.name for run in runs)], told)


def further_results(runs: list[Run]) -> Table:
    """The metrics at the end that are not among the foremost."""
    return Table(["", *(run.name for run in runs)], _metric_rows(runs, foremost=False))


SUMMARY = (
    ("Mean training loss of the whole run", "train_loss", ""),
    ("Duration of training", "train_runtime", "seconds"),
    ("Training samples per second", "train_samples_per_second", ""),
    ("Optimizer steps per second", "train_steps_per_second", ""),
    ("Training tokens per second", "train_tokens_per_second", ""),
)


def differing_arguments(runs: list[Run]) -> Table:
    """The arguments that are not the same in all runs whose arguments are known."""
    known = [run for run in runs if run.stored is not None]
    names = dict.fromkeys(name for run in known for name in run.stored or {})
    rows = []
    for name in names:
        values = [(run.stored or {}).get(name, ABSENT) for run in known]
        # What one release stores and another does not know is no difference where it is idle.
        present = [value for value in values if value != ABSENT]
        changed = any(run.changed is not None and name in {**run.changed.given, **run.changed.unknown} for run in known)
        if all(same(value, present[0]) for value in present) and not (len(present) < len(values) and changed):
            continue
        if changed:
            rows.append([Cell(name), *(Cell((run.stored or {}).get(name, ABSENT)) for run in runs)])
    return Table(["argument", *(run.name for run in runs)], rows)


def changed_arguments(runs: list[Run], but: Table | None = None) -> Table:
    """Arguments away from their defaults, with these.

    Parameters:
        runs: where there are several, only what they have in common is told.
        but: a table whose arguments are left out.
    """
    told = {row[0].text for row in but.rows} if but is not None else set()
    rows = []
    for run in [run for run in runs if run.changed is not None][:1]:
        assert run.changed is not None
        for name, value in {**run.changed.given, **run.changed.unknown}.items():
            if name not in told:
                rows.append([Cell(name), Cell(value), Cell(run.changed.defaults.get(name, "not known here"))])
    return Table(["argument", "value", "default"], rows)


def _row(label: str, runs: list[Run], cell: object) -> list[Cell]:
    assert callable(cell)
    return [Cell(label), *(cell(run) for run in runs)]


def _metric_rows(runs: list[Run], foremost: bool) -> list[list[Cell]]:
    chosen = foremost_metrics(runs)
    metrics = [metric for metric in ordered_metrics(runs) if metric not in COSTS and (metric in chosen) == foremost]
    rows = []
    for metric in metrics:
        for source in all_sources(runs):
            cells = [_last(metric, run.history.curves.get((metric, source), []), source) for run in runs]
            label = metric if source == TRAINING else f"{metric}, {source}"
            if any(cell != NOTHING for cell in cells):
                rows.append([Cell(label, "last logged"), *cells])
    return rows


def _last(metric: str, points: list[Point], source: str) -> Cell:
    if not points:
        return NOTHING
    finite = [point for point in points if math.isfinite(point.value)]
    if source == TRAINING or len(finite) < 2:
        return Cell(short_number(points[-1].value))
    less = metric.endswith(LESS_IS_BETTER)
    extreme = (min if less else max)(finite, key=lambda point: point.value)
    word = "lowest" if less else "highest"
    return Cell(short_number(points[-1].value), f"{word} {short_number(extreme.value)} at step {extreme.step}")


def _epochs(run: Run) -> float | None:
    return run.state.epoch or run.history.last_epoch


def _of(done: float | None, planned: float) -> Cell:
    if not done:
        return Cell("0") if done == 0 else NOTHING
    if planned > 0 and done != planned:
        return Cell(f"{short_number(done)} of {short_number(planned)}")
    return Cell(short_number(done))


def best_metric_name(run: Run) -> str:
    """The metric that decides which evaluation is best, by the arguments."""
    name = (run.stored or {}).get("metric_for_best_model", "None")
    return "" if name == "None" else name


def _best(run: Run) -> Cell:
    if run.state.best_metric is None:
        return NOTHING
    step = "" if run.best_step is None else f" at step {run.best_step}"
    return Cell(short_number(run.state.best_metric), f"{best_metric_name(run)}{step}".strip())


def _from_summary(run: Run, name: str, unit: str) -> Cell:
    value = run.history.summary.get(name)
    if value is None:
        return NOTHING
    return Cell(duration(value) if unit == "seconds" else short_number(value))


def _count(number: float | None) -> Cell:
    return Cell(short_number(number)) if number else NOTHING


def duration(seconds: float) -> str:
    """A length of time as people say it: 5.05 s, 3 min 20 s, 2 h 5 min, 1 d 3 h."""
    if not math.isfinite(seconds) or seconds < 60:
        return f"{short_number(seconds, 3)} s"
    for size, unit, smaller, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            rest = int(seconds % size // smaller)
            return f"{int(seconds // size)} {unit}" + (f" {rest} {small_unit}" if rest else "")
    return f"{seconds:.0f} s"
