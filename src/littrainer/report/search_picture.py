"""The charts of a search, drawn by matplotlib."""

from __future__ import annotations

import math
from typing import Any

from littrainer.report.axes import Axis
from littrainer.report.importance import Importance, importance_of
from littrainer.report.picture_style import (
    ABOVE,
    BELOW,
    BETWEEN,
    COLUMNS,
    HEADING_LETTER,
    INK,
    LEFT,
    PALETTE,
    PLOT,
    RIGHT,
    SHAPES,
    SOFT,
    TITLE_LETTERS,
    finish_axes,
    lines_of,
    text_of,
)
from littrainer.report.search_panels import (
    ABSENT_LABEL,
    ABSENT_SHARE,
    ObjectivePanel,
    ParallelPanel,
    foremost_parameters,
    objective_panels,
    parallel_panel,
)
from littrainer.report.search_svg import COMPLETE_LOOK, FAILED_COLOUR, PRUNED_LOOK, spaced_ticks
from littrainer.report.searches import Search, parameters_of
from littrainer.search.record import COMPLETE, FAILED, PRUNED

# As the page has them in its light mode, from worse to better.
GRADE_COLOURS = ("#d5dae1", "#b5cbe0", "#7fb0d8", "#3d8dc4", "#00568a")
BEST_COLOUR = PALETTE[1]
PARALLEL_HEIGHT, PARALLEL_ABOVE, PARALLEL_BELOW = 2.9, 1.3, 0.55
# Names of bars stand beside them, in the plot's own room.
NAME_SHARE, NAME_LETTERS = 0.42, 30
TICK_INCHES = 0.16
MOST_NAME_LETTERS = 28


def search_drawing(search: Search, scale: str) -> Any:
    """A search as a matplotlib figure.

    Parameters:
        scale: of the axes of objectives: `auto`, `linear` or `log`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    parameters = parameters_of(search)
    weighed = [importance_of(search, parameters, number) for number in range(len(search.directions))]
    panels = objective_panels(search, scale)
    parallel = parallel_panel(search, parameters, foremost_parameters(parameters, weighed[0]))
    told = [(number, found) for number, found in enumerate(weighed) if found.shares]
    charts = len(panels) + len(told)
    rows = max(1, math.ceil(charts / COLUMNS))
    width = COLUMNS * (LEFT + PLOT[0] + RIGHT)
    below = PARALLEL_ABOVE + PARALLEL_HEIGHT + PARALLEL_BELOW if parallel else 0.0
    height = ABOVE + rows * PLOT[1] + (rows - 1) * BETWEEN + BELOW + below
    figure: Any = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    heading = lines_of(search.name, int(width / HEADING_LETTER))
    middle = {"x": 0.5, "ha": "center", "va": "center", "parse_math": False}
    figure.text(y=1 - 0.4 / height, s=heading, fontsize=14, fontweight="bold", **middle)
    figure.text(y=1 - 0.75 / height, s=_counts(search), fontsize=10, color=SOFT, **middle)
    for number in range(charts):
        row, column = divmod(number, COLUMNS)
        left = LEFT + column * (LEFT + PLOT[0] + RIGHT)
        bottom = height - ABOVE - (row + 1) * PLOT[1] - row * BETWEEN
        axes = figure.add_axes((left / width, bottom / height, PLOT[0] / width, PLOT[1] / height))
        if number < len(panels):
            _draw_objective(axes, panels[number])
        else:
            objective, found = told[number - len(panels)]
            _draw_importance(axes, found, search.objective_names()[objective] if len(search.directions) > 1 else "")
    if parallel:
        place = (LEFT / width, PARALLEL_BELOW / height, (width - 2 * LEFT) / width, PARALLEL_HEIGHT / height)
        _draw_parallel(figure.add_axes(place), parallel)
    if not charts:
        figure.text(0.5, 0.4, "no trial has ended", ha="center", color=SOFT)
    return figure


def _counts(search: Search) -> str:
    states = (COMPLETE, PRUNED, FAILED)
    counts = [(sum(trial.state == state for trial in search.trials), state) for state in states]
    return f"{len(search.trials)} trials: " + ", ".join(f"{count} {state}" for count, state in counts if count)


def _draw_objective(axes: Any, panel: ObjectivePanel) -> None:
    if panel.best:
        last = max(spot.x for spot in panel.spots)
        steps = [*panel.best, (last, panel.best[-1][1])]
        axes.plot(*zip(*steps, strict=True), drawstyle="steps-post", color=SOFT, linewidth=1.2, label="best so far")
    unclipped = {"clip_on": False, "linestyle": "none"}
    for state, (colour, shape) in ((COMPLETE, COMPLETE_LOOK), (PRUNED, PRUNED_LOOK)):
        points = [(spot.x, spot.value) for spot in panel.spots if spot.state == state and spot.value is not None]
        if points:
            look = {"marker": SHAPES[shape], "markersize": 5, "color": PALETTE[colour]}
            axes.plot(*zip(*points, strict=True), label=state, markeredgecolor="white", **look, **unclipped)
    missing = [spot.x for spot in panel.spots if spot.value is None]
    if missing:
        place = {"transform": axes.get_xaxis_transform(), "color": PALETTE[FAILED_COLOUR]}
        axes.plot(missing, [0.03] * len(missing), "x", label="without a value", **place, clip_on=False)
    stars = [(spot.x, spot.value) for spot in panel.spots if spot.trial in panel.stars and spot.value is not None]
    if stars:
        look = {"marker": "*", "markersize": 13, "color": INK, "markeredgecolor": "white", "zorder": 5}
        axes.plot(*zip(*stars, strict=True), label="best", **look, **unclipped)
    better = f"{'higher' if panel.maximized else 'lower'} is better"
    finish_axes(axes, f"{panel.title} over trials", [better], panel.trials, panel.values, "trial")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=5, frameon=False, fontsize=8.5, columnspacing=1.0
        )


def _draw_importance(axes: Any, found: Importance, objective: str) -> None:
    shares = list(found.shares.items())[:10]
    highest = shares[0][1] or 1.0
    room = 1 - NAME_SHARE - 0.1
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    # As many places as there may be bars, so that a few of them are not huge.
    axes.set_ylim(max(len(shares), 6) - 0.4, -0.6)
    for place, (name, share) in enumerate(shares):
        axes.barh(place, room * share / highest, left=NAME_SHARE, height=0.6, color=PALETTE[0])
        label = _shorter(name, NAME_LETTERS)
        axes.text(0, place, label, va="center", fontsize=9.5, parse_math=False)
        axes.text(NAME_SHARE + room * share / highest + 0.015, place, f"{share:.2f}", va="center", fontsize=9.5)
    whose = f" for {objective}" if objective else ""
    title = lines_of(f"Importance of parameters{whose}", TITLE_LETTERS)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", parse_math=False)


def _draw_parallel(axes: Any, panel: ParallelPanel) -> None:
    count = len(panel.axes)
    bottom = ABSENT_SHARE if any(panel.incomplete) else 0.0
    axes.set_axis_off()
    axes.set_xlim(0, count - 1)
    axes.set_ylim(bottom, 1)
    for thread in panel.threads:
        look = {"color": BEST_COLOUR, "linewidth": 2.6} if thread.best else {"color": GRADE_COLOURS[thread.grade]}
        axes.plot(range(count), thread.shares, clip_on=False, **{"linewidth": 1.2, **look})
    for number, (name, axis) in enumerate(zip(panel.names, panel.axes, strict=True)):
        axes.plot([number, number], [0, 1], color=SOFT, linewidth=0.8, clip_on=False)
        align = {0: "left", count - 1: "right"}.get(number, "center")
        raised = 1.13 if number % 2 and count > 5 else 1.05
        axes.text(number, raised, _shorter(name, MOST_NAME_LETTERS), ha=align, color=SOFT, fontsize=9, parse_math=False)
        _label_axis(axes, number, axis, number == count - 1)
        if panel.incomplete[number]:
            axes.text(number, ABSENT_SHARE - 0.07, ABSENT_LABEL, ha="center", color=SOFT, fontsize=8.5)
    title = "Complete trials across their parameters: the best in orange, better ones darker"
    axes.text(0, 1.24, title, fontsize=11, fontweight="bold")


def _label_axis(axes: Any, number: int, axis: Axis, at_the_right: bool) -> None:
    behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6}
    for share, label in spaced_ticks(axis, PARALLEL_HEIGHT, TICK_INCHES):
        place = {"xytext": (5 if at_the_right else -5, 0), "textcoords": "offset points"}
        aligned = {"ha": "left" if at_the_right else "right", "va": "center", "fontsize": 8.5, "color": SOFT}
        axes.annotate(_shorter(label, 12), (number, share), bbox=behind, **place, **aligned).set_parse_math(False)


def _shorter(name: str, letters: int) -> str:
    cleaned = text_of(name).strip()
    return cleaned if len(cleaned) <= letters else f"{cleaned[: letters - 3]}..."
