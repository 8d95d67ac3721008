"""The charts of a report as one PNG picture, drawn by matplotlib."""

from __future__ import annotations

import importlib.util
import io
import math
import warnings
from typing import Any

from littrainer.report.panels import Curve, Panel, legend, panels_of
from littrainer.report.reading import Run
from littrainer.report.svg import COLOURS, DENSE_FROM, MOST_MARKED, Frame, frames_of, stretches

# As the page has them in its light mode.
PALETTE = ("#0072b2", "#c8500a", "#007a5a", "#a8428a", "#8a6a00", "#5b4fcf", "#4d5562")
LINE_STYLES: tuple[Any, ...] = (
    "-",
    (0, (4, 2)),
    (0, (1.3, 2)),
    (0, (6, 2, 1.3, 2)),
    (0, (8, 3)),
    (0, (3, 1.5, 1, 1.5)),
)
SHAPES = ("o", "s", "^", "D", "v")
INCHES_PER_CHART = (5.6, 3.5)
DOTS_PER_INCH = 130
COLUMNS = 2
LEGEND_COLUMNS = 8
LINE_WIDTH, DENSE_WIDTH = 1.6, 0.8
INK, SOFT, GRID = "#1a1d23", "#5b6270", "#e9ecf0"
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10.0,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": GRID,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "ytick.left": False,
    "text.usetex": False,
}


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def picture(runs: list[Run], scale: str, mark: str) -> bytes:
    """The charts of one or several runs as the bytes of a PNG file.

    Parameters:
        scale: of the charts' value axes: `auto`, `linear` or `log`.
        mark: what the file names as the software that wrote it.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    panels = panels_of(runs)
    rows = max(1, math.ceil(len(panels) / COLUMNS))
    columns = min(COLUMNS, max(1, len(panels)))
    size = (INCHES_PER_CHART[0] * columns, INCHES_PER_CHART[1] * rows + 0.7)
    written = io.BytesIO()
    # Names in other scripts than the font has are drawn as boxes, with a warning for each letter.
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.2, h_pad=0.12))
        FigureCanvasAgg(figure)
        heading = runs[0].name if len(runs) == 1 else f"{len(runs)} trainings compared"
        figure.suptitle(_text(heading), fontsize=14, fontweight="bold", parse_math=False)
        for number, (panel, frame) in enumerate(zip(panels, frames_of(panels, scale), strict=True)):
            _draw(figure.add_subplot(rows, columns, number + 1), panel, frame)
        _add_legend(figure, panels, runs)
        if not panels:
            figure.text(0.5, 0.5, "nothing was logged", ha="center", color=SOFT)
        figure.savefig(written, format="png", dpi=DOTS_PER_INCH, metadata={"Software": mark})
    return written.getvalue()


def _add_legend(figure: Any, panels: list[Panel], runs: list[Run]) -> None:
    """One legend beneath all charts, where it covers none of them."""
    from matplotlib.lines import Line2D

    curves = [curve for panel in panels for curve in panel.curves]
    entries = legend(curves, runs)
    handles = [
        Line2D([], [], **_line(entry.colour, entry.dash), **({} if entry.marker is None else _marks(entry.marker)))
        for entry in entries
    ]
    labels = [_text(entry.label) for entry in entries]
    if any(curve.best is not None for curve in curves):
        handles.append(Line2D([], [], linestyle="none", marker="*", color=INK, markersize=10))
        labels.append("best")
    if handles:
        columns = min(len(handles), LEGEND_COLUMNS)
        drawn = figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
        for text in drawn.get_texts():
            text.set_parse_math(False)


def _draw(axes: Any, panel: Panel, frame: Frame) -> None:
    for curve in panel.curves:
        _draw_curve(axes, curve)
    remarks = ", ".join(filter(None, [panel.unit, "log scale" if frame.values.logarithmic else ""]))
    axes.set_title(_text(panel.title), loc="left", fontsize=11, fontweight="bold", parse_math=False)
    axes.set_title(remarks, loc="right", fontsize=9, color=SOFT)
    if frame.values.logarithmic:
        axes.set_yscale("log")
        axes.minorticks_off()
    axes.set_xlim(frame.steps.low, frame.steps.high)
    axes.set_ylim(frame.values.low, frame.values.high)
    axes.set_xticks(frame.steps.ticks, frame.steps.labels)
    axes.set_yticks(frame.values.ticks, frame.values.labels)
    axes.set_xlabel("optimizer step")


def _line(colour: int | None, dash: int) -> dict[str, Any]:
    chosen = SOFT if colour is None else PALETTE[colour % COLOURS]
    return {"color": chosen, "linestyle": LINE_STYLES[dash % len(LINE_STYLES)], "linewidth": LINE_WIDTH}


def _marks(marker: int) -> dict[str, Any]:
    return {"marker": SHAPES[marker % len(SHAPES)], "markersize": 4.5, "markerfacecolor": "white"}


def _draw_curve(axes: Any, curve: Curve) -> None:
    line = _line(curve.look.colour, curve.look.dash)
    if len(curve.points) > DENSE_FROM:
        line["linewidth"] = DENSE_WIDTH
    for stretch in stretches(curve.points):
        marked = _marks(curve.look.marker) if len(stretch) == 1 or len(curve.points) <= MOST_MARKED else {}
        # Not clipped: a mark at the edge of the chart would be cut in half.
        axes.plot(*zip(*[(point.step, point.value) for point in stretch], strict=True), **line, **marked, clip_on=False)
    missing = [point.step for point in curve.points if not math.isfinite(point.value)]
    if missing:
        # Upwards from the bottom of the chart, whatever its scale is.
        place = axes.get_xaxis_transform()
        axes.plot(missing, [0.03] * len(missing), "x", color=line["color"], transform=place, clip_on=False)
    if curve.best is not None:
        star = {"color": INK, "markersize": 13, "markeredgecolor": "white", "zorder": 5, "clip_on": False}
        axes.plot([curve.best.step], [curve.best.value], "*", **star)


def _text(text: str) -> str:
    """A label that matplotlib takes as it stands; it leaves those out of a legend that begin with an underscore."""
    cleaned = text.encode("utf-8", "backslashreplace").decode("utf-8")
    printable = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in cleaned)
    return f" {printable}" if printable.startswith("_") else printable
