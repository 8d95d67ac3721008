"""Draws how cost grows with size, from a record: `python -m benchmarks.growth [record.json]`.

Each picture is of one benchmark's cases of one curve: a figure of each side against the setting that grows. Points are
medians over the rounds, bars reach from the smallest to the largest. Each is a file, so that a phone shows them one
below the other, and its colours can be read on a light and on a dark page.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import record
from .catalogue import BENCHMARKS
from .figures import Figures
from .jobs import JOBS, parameters_of
from .sides import ROOT

FOLDER = ROOT / "docs" / "benchmarks"
INK = "#7d8590"
# Colour and marker by the beginning of a side's name; the first that fits.
LOOKS = (
    ("littrainer, ", "#63b98a", "s"),
    ("littrainer", "#2a9d5c", "o"),
    ("transformers 5.3.0", "#dd9a52", "v"),
    ("transformers", "#d0604a", "^"),
    ("Lightning", "#8b6bb8", "D"),
    ("raw", "#7d8590", "x"),
)


@dataclass(frozen=True)
class Panel:
    """One curve of a benchmark for each side.

    Parameters:
        benchmark: Whose figures.
        curve: Which of its cases.
        title: Above the panel.
        setting: Of the cases, the number that grows; `job` stands for the parameters of its model.
        size: What that number is of.
        key: Of what is measured.
        unit: Of that.
        is_logarithmic: Whether both axes are.
    """

    benchmark: str
    curve: str
    title: str
    setting: str
    size: str
    key: str
    unit: str
    is_logarithmic: bool = False

    @property
    def file_name(self) -> str:
        return f"growth-{self.benchmark}-{self.curve}.svg".replace("_", "-")


PANELS = (
    Panel("startup", "steps", "A whole training", "steps", "optimizer steps", "whole_cpu_ms", "CPU ms"),
    Panel("step", "layers", "An optimizer step", "job", "parameters", "cpu_us", "CPU µs"),
    Panel("startup", "samples", "train() to its first step", "samples", "samples", "first_step_cpu_ms", "CPU ms"),
    Panel("evaluation", "mlp-batches", "An evaluation", "batches", "batches of 8", "cpu_ms", "CPU ms"),
    Panel("evaluation_memory", "samples", "Peak of an evaluation", "samples", "samples", "peak_mib", "MiB"),
    Panel("resuming", "skipped", "Resuming to the first new step", "skipped", "steps skipped", "cpu_ms", "CPU ms"),
    Panel("length_grouping", "rows", "An epoch's order by length", "rows", "samples", "cpu_ms", "CPU ms", True),
    Panel("checkpoints", "parameters", "Stall of a save", "job", "parameters", "stall_ms", "wall ms", True),
    Panel("checkpoints", "kept", "Stall of a save of an MLP", "kept", "checkpoints kept", "stall_ms", "wall ms"),
)


def looks(side: str) -> tuple[str, str]:
    return next((colour, marker) for beginning, colour, marker in LOOKS if side.startswith(beginning))


def points(panel: Panel, figures: Figures) -> dict[str, list[tuple[float, list[float]]]]:
    """By side, each size with what the rounds measured there."""
    found: dict[str, list[tuple[float, list[float]]]] = {}
    for case in figures.of_curve(panel.curve):
        setting = figures.setting(case, panel.setting)
        size = parameters_of(JOBS[setting].model()) if panel.setting == "job" else setting
        for side in figures.sides(case):
            found.setdefault(side, []).append((size, figures.values(case, side, panel.key)))
    # A side that one case alone has makes no curve.
    return {side: sorted(sizes) for side, sizes in found.items() if len(sizes) > 1}


def draw(axes: Any, panel: Panel, figures: Figures) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for side, sizes in points(panel, figures).items():
        across = [size for size, _ in sizes]
        middles = [statistics.median(values) for _, values in sizes]
        reach = [
            [middle - min(values) for middle, (_, values) in zip(middles, sizes, strict=True)],
            [max(values) - middle for middle, (_, values) in zip(middles, sizes, strict=True)],
        ]
        colour, marker = looks(side)
        axes.errorbar(
            across, middles, yerr=reach, color=colour, marker=marker, markersize=5, linewidth=1.6, capsize=3, label=side
        )
    axes.set_title(panel.title, loc="left", fontweight="bold")
    axes.set_xlabel(panel.size)
    axes.set_ylabel(panel.unit)
    if panel.is_logarithmic:
        axes.set_xscale("log")
        axes.set_yscale("log")
    else:
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        # Whole numbers instead of a power of ten in a corner.
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.has_data():
        axes.legend(fontsize=10, frameon=False)


def draw_growth(found: record.Record, folder: Path) -> list[Path]:
    """Draw a picture for each panel whose benchmark the record has."""
    import matplotlib

    # Text stays text, the same figures give the same file, and the ground is that of the page.
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "littrainer",
        "font.size": 11,
        **{f"{part}color": INK for part in ("text.", "axes.edge", "axes.label", "xtick.", "ytick.", "grid.")},
    }
    written = []
    with matplotlib.rc_context(settings):
        from matplotlib.figure import Figure

        for panel in PANELS:
            if panel.benchmark in found["benchmarks"]:
                figure = Figure(figsize=(5.4, 3.4), layout="constrained")
                draw(figure.subplots(), panel, record.figures_of(found, BENCHMARKS[panel.benchmark]))
                written.append(folder / panel.file_name)
                figure.savefig(written[-1], metadata={"Date": None}, transparent=True)
    return written


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__.splitlines()[0])
    parser.add_argument("record", nargs="?", type=Path, default=record.RECORDED, help="the file that --json wrote")
    for path in draw_growth(record.read(parser.parse_args().record), FOLDER):
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB", file=sys.stderr)


if __name__ == "__main__":
    main()
