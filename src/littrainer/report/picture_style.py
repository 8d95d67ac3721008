"""How pictures look: colours, shapes and measures that their charts share."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from littrainer.report.axes import Axis
from littrainer.report.labels import shortened, writable

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
DOTS_PER_INCH = 130
COLUMNS = 2
# Everything has its place in inches: a layout that is fitted to all charts takes minutes where there are many.
PLOT = (4.75, 2.6)
LEFT, RIGHT = 0.75, 0.2
# Between two charts of a column: step labels, the axis' name, and a title of up to three lines.
BETWEEN = 1.2
ABOVE, BELOW = 1.45, 0.65
LEGEND_ROW = 0.22
# Of the widest letters that are usual, with the sample of a line before a label.
LEGEND_LETTER, LEGEND_SAMPLE = 0.075, 0.75
TITLE_LETTERS, HEADING_LETTER = 42, 0.125
# What a picture shows before it refers to the page.
MOST_ENTRIES = 32
MOST_CURVES = 32
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


def text_of(text: str) -> str:
    """A label that matplotlib takes as it stands; it leaves those out of a legend that begin with an underscore."""
    cleaned = writable(shortened(text))
    printable = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in cleaned)
    return f" {printable}" if printable.startswith("_") else printable


def lines_of(text: str, letters: int) -> str:
    """A label over as many lines as it needs where one has room for so many letters."""
    return "\n".join(textwrap.wrap(text_of(text).strip(), letters))


def finish_axes(axes: Any, title: str, remarks: Sequence[str], across: Axis, up: Axis, name: str) -> None:
    """Give a chart its title, with remarks at its right, and its axes.

    Parameters:
        across, up: the axis below, which has this name, and that at the left.
    """
    remark = ", ".join(filter(None, [*remarks, "log scale" if up.logarithmic else ""]))
    heading = lines_of(title, TITLE_LETTERS - len(remark))
    axes.set_title(heading, loc="left", fontsize=11, fontweight="bold", parse_math=False)
    axes.set_title(remark, loc="right", fontsize=9, color=SOFT)
    if up.logarithmic:
        axes.set_yscale("log")
        axes.minorticks_off()
    axes.set_xlim(across.low, across.high)
    axes.set_ylim(up.low, up.high)
    axes.set_xticks(across.ticks, across.labels)
    axes.set_yticks(up.ticks, up.labels)
    axes.set_xlabel(name)
