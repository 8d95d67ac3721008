"""The charts of a report as one PNG picture, drawn by matplotlib."""

from __future__ import annotations

import importlib.util
import io
import math
import warnings
from collections.abc import Sequence
from typing import Any

from littrainer.report.panels import Curve, Panel, foremost_metrics, legend, panels_of
from littrainer.report.picture_style import (
    ABOVE,
    BELOW,
    BETWEEN,
    COLUMNS,
    DENSE_WIDTH,
    DOTS_PER_INCH,
    HEADING_LETTER,
    INK,
    LEFT,
    LEGEND_LETTER,
    LEGEND_ROW,
    LEGEND_SAMPLE,
    LINE_STYLES,
    LINE_WIDTH,
    MOST_CURVES,
    MOST_ENTRIES,
    PALETTE,
    PLOT,
    RIGHT,
    SHAPES,
    SOFT,
    STYLE,
    finish_axes,
    lines_of,
    text_of,
)
from littrainer.report.reading import Run
from littrainer.report.search_picture import search_drawing
from littrainer.report.searches import Search
from littrainer.report.svg import COLOURS, DENSE_FROM, MOST_MARKED, Frame, frames_of, stretches, thinned


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def picture(runs: list[Run], scale: str, mark: str, searches: Sequence[Search] = ()) -> bytes:
    """Searches, and below them the foremost charts of one or several runs, as the bytes of a PNG file.

    Parameters:
        scale: of the charts' value axes: `auto`, `linear` or `log`.
        mark: what the file names as the software that wrote it.
    """
    import matplotlib
    from matplotlib import image

    written = io.BytesIO()
    # Names in other scripts than the font has are drawn as boxes, with a warning for each letter.
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figures = [search_drawing(search, scale) for search in searches]
        figures += [drawing(runs, scale)] if runs else []
        if len(figures) == 1:
            figures[0].savefig(written, format="png", dpi=DOTS_PER_INCH, metadata={"Software": mark})
        else:
            image.imsave(written, _stacked(figures), format="png", dpi=DOTS_PER_INCH, metadata={"Software": mark})
    return written.getvalue()


def _stacked(figures: Sequence[Any]) -> Any:
    """The pixels of several pictures below each other, on white as wide as the widest."""
    import numpy

    drawn = []
    for figure in figures:
        figure.set_dpi(DOTS_PER_INCH)
        figure.canvas.draw()
        drawn.append(numpy.asarray(figure.canvas.buffer_rgba()))
    width = max(pixels.shape[1] for pixels in drawn)
    room = [((0, 0), (0, width - pixels.shape[1]), (0, 0)) for pixels in drawn]
    return numpy.concatenate(
        [numpy.pad(pixels, around, constant_values=255) for pixels, around in zip(drawn, room, strict=True)]
    )


def drawing(runs: list[Run], scale: str) -> Any:
    """The picture as a matplotlib figure; parameters as of `picture`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    every = panels_of(runs)
    foremost = foremost_metrics(runs)
    panels = [panel for panel in every if panel.metric in foremost]
    rows, columns = max(1, math.ceil(len(panels) / COLUMNS)), min(COLUMNS, max(1, len(panels)))
    width = columns * (LEFT + PLOT[0] + RIGHT)
    handles, labels = _legend(panels, runs)
    letters = max(map(len, labels), default=0)
    entries_per_row = max(1, int(width / (LEGEND_SAMPLE + LEGEND_LETTER * letters)))
    below = BELOW + LEGEND_ROW * math.ceil(len(labels) / entries_per_row)
    height = ABOVE + rows * PLOT[1] + (rows - 1) * BETWEEN + below
    figure: Any = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    heading = runs[0].name if len(runs) == 1 else f"{len(runs)} trainings compared"
    heading = lines_of(heading, int(width / HEADING_LETTER))
    middle = {"x": 0.5, "ha": "center"}
    figure.text(y=1 - 0.4 / height, s=heading, va="center", fontsize=14, fontweight="bold", parse_math=False, **middle)
    for number, (panel, frame) in enumerate(zip(panels, frames_of(panels, scale), strict=True)):
        row, column = divmod(number, columns)
        left = LEFT + column * (LEFT + PLOT[0] + RIGHT)
        bottom = height - ABOVE - (row + 1) * PLOT[1] - row * BETWEEN
        place = (left / width, bottom / height, PLOT[0] / width, PLOT[1] / height)
        _draw(figure.add_axes(place), panel, frame)
    if labels:
        legend_place = {"loc": "lower center", "bbox_to_anchor": (0.5, 0.02 / height), "borderaxespad": 0.2}
        drawn = figure.legend(handles, labels, ncols=entries_per_row, frameon=False, fontsize=9, **legend_place)
        for text in drawn.get_texts():
            text.set_parse_math(False)
    if len(every) > len(panels):
        told = f"{len(every) - len(panels)} more metrics on the page"
        figure.text(y=1 - 0.75 / height, s=told, va="center", fontsize=10, color=SOFT, **middle)
    if not panels:
        figure.text(0.5, 0.5, "nothing was logged", ha="center", color=SOFT)
    return figure


def _legend(panels: list[Panel], runs: list[Run]) -> tuple[list[Any], list[str]]:
    """Samples and labels of the one legend beneath all charts, where it covers none of them."""
    from matplotlib.lines import Line2D

    curves = [curve for panel in panels for curve in panel.curves]
    entries = legend(curves, runs)
    handles = [
        Line2D([], [], **_line(entry.colour, entry.dash), **({} if entry.marker is None else _marks(entry.marker)))
        for entry in entries[:MOST_ENTRIES]
    ]
    labels = [text_of(entry.label) for entry in entries[:MOST_ENTRIES]]
    if any(curve.best is not None for curve in curves):
        handles.append(Line2D([], [], linestyle="none", marker="*", color=INK, markersize=10))
        labels.append("best")
    if len(entries) > MOST_ENTRIES:
        handles.append(Line2D([], [], linestyle="none"))
        labels.append(f"{len(entries) - MOST_ENTRIES} more on the page")
    return handles, labels


def _draw(axes: Any, panel: Panel, frame: Frame) -> None:
    for curve in panel.curves[:MOST_CURVES]:
        _draw_curve(axes, curve, frame)
    finish_axes(axes, panel.title, [panel.unit], frame.steps, frame.values, "optimizer step")


def _line(colour: int | None, dash: int) -> dict[str, Any]:
    chosen = SOFT if colour is None else PALETTE[colour % COLOURS]
    return {"color": chosen, "linestyle": LINE_STYLES[dash % len(LINE_STYLES)], "linewidth": LINE_WIDTH}


def _marks(marker: int) -> dict[str, Any]:
    return {"marker": SHAPES[marker % len(SHAPES)], "markersize": 4.5, "markerfacecolor": "white"}


def _draw_curve(axes: Any, curve: Curve, frame: Frame) -> None:
    points = thinned(curve.points, frame)
    line = _line(curve.look.colour, curve.look.dash)
    if len(curve.points) > DENSE_FROM:
        line["linewidth"] = DENSE_WIDTH
    for stretch in stretches(points):
        marked = _marks(curve.look.marker) if len(stretch) == 1 or len(curve.points) <= MOST_MARKED else {}
        # Not clipped: a mark at the edge of the chart would be cut in half.
        axes.plot(*zip(*[(point.step, point.value) for point in stretch], strict=True), **line, **marked, clip_on=False)
    missing = [point.step for point in points if not math.isfinite(point.value)]
    if missing:
        # Upwards from the bottom of the chart, whatever its scale is.
        place = axes.get_xaxis_transform()
        axes.plot(missing, [0.03] * len(missing), "x", color=line["color"], transform=place, clip_on=False)
    if curve.best is not None:
        star = {"color": INK, "markersize": 13, "markeredgecolor": "white", "zorder": 5, "clip_on": False}
        axes.plot([curve.best.step], [curve.best.value], "*", **star)
