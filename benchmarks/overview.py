"""The measures that the README shows: a table, and a picture in light and dark (`python -m benchmarks.overview`)."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import record
from .catalogue import BENCHMARKS
from .figures import Figures, markdown
from .measured.evaluation_memory import STREAMING
from .sides import LIGHTNING, OURS, RAW, ROOT, THEIRS

PICTURE = ROOT / "docs" / "images" / "measured.svg"
SIDES = (OURS.name, THEIRS.name, LIGHTNING.name)
STREAMED = "with torchmetrics"
COLOURS = {OURS.name: "#2a9d5c", STREAMED: "#7cc8a0", THEIRS.name: "#c8553d", LIGHTNING.name: "#8b6bb8"}
THEMES = {"light": "#1b1f24", "dark": "#e6edf3"}


@dataclass(frozen=True)
class Measure:
    """One figure of each side.

    Parameters:
        title: What is measured; of the picture too, if that shows it.
        benchmark: Whose figures.
        case: Which of its cases.
        key: Of what is measured.
        unit: Of that.
        is_over_raw_loop: Whether the figure is what a side takes more than the raw loop of the same round.
        names: What stands for each bar or column, and the name of the benchmark for it.
        is_drawn: Whether the picture shows it.
    """

    title: str
    benchmark: str
    case: str
    key: str
    unit: str
    is_over_raw_loop: bool = False
    names: tuple[tuple[str, str], ...] = tuple((side, side) for side in SIDES)
    is_drawn: bool = False

    def of(self, figures: Figures) -> dict[str, float]:
        """The figure of each side that was measured."""
        return {
            shown: figures.difference(self.case, name, RAW.name, self.key)
            if self.is_over_raw_loop
            else figures.median(self.case, name, self.key)
            for shown, name in self.names
            if name in figures.sides(self.case)
        }


IMPORTS = (
    (OURS.name, "from littrainer import Trainer, TrainingArguments"),
    (THEIRS.name, "from transformers import Trainer, TrainingArguments"),
    (LIGHTNING.name, "import lightning.pytorch"),
)
EVALUATED = ((OURS.name, OURS.name), (STREAMED, STREAMING.name), (THEIRS.name, THEIRS.name))
MEASURES = (
    Measure("Overhead of an optimizer step", "step", "mlp", "cpu_us", "µs", True, is_drawn=True),
    Measure("Overhead with 4 micro-batches", "step", "mlp-accumulation", "cpu_us", "µs", True, is_drawn=True),
    Measure("Import of the Trainer", "imports", "statements", "cpu_s", "s", names=IMPORTS, is_drawn=True),
    Measure("`train()` to its first step", "startup", "mlp-first", "first_step_cpu_ms", "ms"),
    Measure("Resuming to the next step", "resuming", "skipped-800", "cpu_ms", "ms"),
    Measure(
        *("Peak memory, 750 MiB of logits", "evaluation_memory", "samples-24", "peak_mib", "MiB"),
        names=EVALUATED,
        is_drawn=True,
    ),
    Measure("Training throughput of BERT", "throughput", "tiny-bert-train", "cpu_samples", "samples/s"),
)


def measured(found: record.Record) -> list[tuple[Measure, dict[str, float]]]:
    """The measures that the record has, with their figures."""
    by_benchmark = {name: record.figures_of(found, BENCHMARKS[name]) for name in found["benchmarks"]}
    return [
        (each, each.of(by_benchmark[each.benchmark]))
        for each in MEASURES
        if each.benchmark in by_benchmark and each.case in by_benchmark[each.benchmark]
    ]


def table(found: record.Record) -> str:
    """A row for each measure."""
    rows = [
        (f"{measure.title}, {measure.unit}", *(_shown(values[side]) if side in values else "-" for side in SIDES))
        for measure, values in measured(found)
    ]
    return markdown(("median of CPU time or memory", *SIDES), rows)


def _shown(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def draw(found: record.Record, picture: Path) -> None:
    """Draw the bars once for each theme, as `measured-light.svg` and `measured-dark.svg`."""
    import matplotlib

    drawn = [(measure, values) for measure, values in measured(found) if measure.is_drawn]
    for theme, ink in THEMES.items():
        # The same figures give the same file; the ground is that of the page.
        settings: dict[Any, Any] = {
            "svg.fonttype": "none",
            "svg.hashsalt": "littrainer",
            "font.size": 11,
            **{f"{part}color": ink for part in ("text.", "axes.label", "xtick.", "ytick.")},
        }
        with matplotlib.rc_context(settings):
            from matplotlib.figure import Figure
            from matplotlib.layout_engine import ConstrainedLayoutEngine

            figure = Figure(figsize=(8.4, 4.2), layout=ConstrainedLayoutEngine(hspace=0.12))
            for axes, (measure, values) in zip(figure.subplots(2, 2).flatten(), drawn, strict=False):
                sides = list(values)
                bars = axes.barh(sides, list(values.values()), color=[COLOURS[side] for side in sides])
                axes.bar_label(bars, [f"{_shown(value)} {measure.unit}" for value in values.values()], padding=4)
                axes.set_title(measure.title, loc="left", fontweight="bold", fontsize=11)
                axes.invert_yaxis()
                axes.set_xlim(right=1.3 * max(values.values()))
                axes.set_xticks([])
                axes.tick_params(length=0)
                axes.spines[:].set_visible(False)
            path = picture.with_stem(f"{picture.stem}-{theme}")
            figure.savefig(path, metadata={"Date": None}, transparent=True)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overview", description=__doc__.splitlines()[0])
    parser.add_argument("record", nargs="?", type=Path, default=record.RECORDED, help="the file that --json wrote")
    draw(record.read(parser.parse_args().record), PICTURE)
    print(f"{PICTURE.stem}-light.svg, {PICTURE.stem}-dark.svg", file=sys.stderr)


if __name__ == "__main__":
    main()
