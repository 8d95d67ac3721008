"""The measures that README and the page of benchmarks show: two tables, and a picture in light and dark.

`python -m benchmarks.overview` draws the picture.
"""

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
from .sides import EARLIER, LIGHTNING, OURS, RAW, ROOT, THEIRS

PICTURE = ROOT / "docs" / "images" / "measured.svg"
SIDES = (OURS.name, THEIRS.name, LIGHTNING.name)
DETAILED_SIDES = (OURS.name, THEIRS.name, EARLIER.name, LIGHTNING.name, RAW.name)
STREAMED = "littrainer + torchmetrics"
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
    names: tuple[tuple[str, str], ...] = tuple((side, side) for side in DETAILED_SIDES)
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
    (EARLIER.name, "from transformers import Trainer, TrainingArguments (5.3.0)"),
    (LIGHTNING.name, "import lightning.pytorch"),
    (RAW.name, "import torch"),
)
SCRIPTS = ((OURS.name, "littrainer run text_classification.py"), (THEIRS.name, "python text_classification.py"))
IN_BACKGROUND = ((OURS.name, "littrainer, async_save"),)
WITHOUT_FSYNC = ((OURS.name, "littrainer, without fsync"),)
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
SMALL_BERT = "BERT of 2 layers, width 32"
BERT = "BERT of 2 layers, width 128"
DETAILED = (
    Measure("Step of an MLP", "step", "mlp", "cpu_us", "µs"),
    Measure("the same, 4 micro-batches", "step", "mlp-accumulation", "cpu_us", "µs"),
    Measure("the same, progress bars", "step", "mlp-bars", "cpu_us", "µs"),
    Measure(f"Step of a {SMALL_BERT}", "step", "bert", "cpu_us", "µs"),
    Measure("the same, 4 micro-batches", "step", "bert-accumulation", "cpu_us", "µs"),
    Measure("the same, progress bars", "step", "bert-bars", "cpu_us", "µs"),
    Measure("Python calls of a step of an MLP", "counts", "mlp", "calls", ""),
    Measure("values read from the device in it", "counts", "mlp", "reads", ""),
    Measure(f"Training of a {BERT}", "throughput", "tiny-bert-train", "cpu_samples", "samples/s"),
    Measure("its evaluation", "throughput", "tiny-bert-eval", "cpu_samples", "samples/s"),
    Measure("Training of a GPT-2 of that size", "throughput", "tiny-gpt2-train", "cpu_samples", "samples/s"),
    Measure("its evaluation", "throughput", "tiny-gpt2-eval", "cpu_samples", "samples/s"),
    Measure("Import of the Trainer, or of torch", "imports", "statements", "cpu_s", "s", names=IMPORTS),
    Measure("Start of a script to its first step", "imports", "script", "cpu_s", "s", names=SCRIPTS),
    Measure("`train()` to its first step", "startup", "mlp-first", "first_step_cpu_ms", "ms"),
    Measure("the same, later in a process", "startup", "mlp-later", "first_step_cpu_ms", "ms"),
    Measure("Resuming after 10 steps", "resuming", "skipped-10", "cpu_ms", "ms"),
    Measure("Resuming after 800 steps", "resuming", "skipped-800", "cpu_ms", "ms"),
    Measure("Order by length, 10,000 samples", "length_grouping", "loaded-10000", "cpu_ms", "ms"),
    Measure("the same, from a column of lengths", "length_grouping", "column-10000", "cpu_ms", "ms"),
    Measure("Evaluation of an MLP, 400 batches", "evaluation", "mlp-400", "cpu_ms", "ms"),
    Measure("the same, 1 batch", "evaluation", "mlp-1", "cpu_ms", "ms"),
    Measure("the same, 1 batch, during training", "evaluation", "mlp-in-fit", "cpu_ms", "ms"),
    Measure(f"Evaluation of a {SMALL_BERT}, 100 batches", "evaluation", "bert-100", "cpu_ms", "ms"),
    Measure("Peak of an evaluation, 188 MiB of logits", "evaluation_memory", "samples-6", "peak_mib", "MiB"),
    Measure("Peak of an evaluation, 750 MiB of logits", "evaluation_memory", "samples-24", "peak_mib", "MiB"),
    Measure(
        *("the same, a torchmetrics metric", "evaluation_memory", "samples-24", "peak_mib", "MiB"),
        names=((OURS.name, STREAMING.name),),
    ),
    Measure("Peak of a training of an MLP", "training_memory", "mlp", "peak_mib", "MiB"),
    Measure("Peak of a training of a BERT, width 256", "training_memory", "memory-bert", "peak_mib", "MiB"),
    Measure("Memory after a search of 15 trials", "search_memory", "trials", "last_mib", "MiB"),
    Measure("Stall of a save, MLP, 600 parameters", "checkpoints", "mlp", "stall_ms", "wall ms"),
    Measure("the same, without `fsync`", "checkpoints", "mlp", "stall_ms", "wall ms", names=WITHOUT_FSYNC),
    Measure(f"Stall of a save, {SMALL_BERT}", "checkpoints", "bert", "stall_ms", "wall ms"),
    Measure("the same, without `fsync`", "checkpoints", "bert", "stall_ms", "wall ms", names=WITHOUT_FSYNC),
    Measure("Stall of a save, MLP, 1 million parameters", "checkpoints", "square-1m", "stall_ms", "wall ms"),
    Measure("the same, `async_save`", "checkpoints", "square-1m", "stall_ms", "wall ms", names=IN_BACKGROUND),
    Measure("Stall of a save, MLP, 17 million", "checkpoints", "square-17m", "stall_ms", "wall ms"),
    Measure("the same, `async_save`", "checkpoints", "square-17m", "stall_ms", "wall ms", names=IN_BACKGROUND),
    Measure("Stall of a save, BERT, 50 million", "checkpoints", "bert-50m", "stall_ms", "wall ms"),
    Measure("the same, `async_save`", "checkpoints", "bert-50m", "stall_ms", "wall ms", names=IN_BACKGROUND),
    Measure("Step of an MLP, two processes", "data_parallel", "mlp-2", "wall_us", "wall µs"),
    Measure(f"Step of a {BERT}, two processes", "data_parallel", "tiny-bert-2", "wall_us", "wall µs"),
)


def measured(found: record.Record, measures: tuple[Measure, ...] = MEASURES) -> list[tuple[Measure, dict[str, float]]]:
    """The measures that the record has, with their figures."""
    by_benchmark = {name: record.figures_of(found, BENCHMARKS[name]) for name in found["benchmarks"]}
    return [
        (each, each.of(by_benchmark[each.benchmark]))
        for each in measures
        if each.benchmark in by_benchmark and each.case in by_benchmark[each.benchmark]
    ]


def table(found: record.Record, measures: tuple[Measure, ...] = MEASURES, sides: tuple[str, ...] = SIDES) -> str:
    """A row for each measure."""
    rows = [
        (
            f"{measure.title}, {measure.unit}" if measure.unit else measure.title,
            *(_shown(values[side]) if side in values else "-" for side in sides),
        )
        for measure, values in measured(found, measures)
    ]
    return markdown(("median of CPU time or memory", *sides), rows)


def _shown(value: float) -> str:
    return f"{value:.1f}" if value < 10 and value % 1 else f"{value:.0f}"


def draw(found: record.Record, picture: Path) -> None:
    """Draw the bars once for each theme, as `measured-light.svg` and `measured-dark.svg`."""
    import matplotlib

    drawn = [(measure, values) for measure, values in measured(found) if measure.is_drawn]
    for theme, ink in THEMES.items():
        # The same figures give the same file; the ground is that of the page.
        settings: dict[Any, Any] = {
            "svg.fonttype": "none",
            "svg.hashsalt": "littrainer",
            "font.size": 13,
            **{f"{part}color": ink for part in ("text.", "axes.label", "xtick.", "ytick.")},
        }
        with matplotlib.rc_context(settings):
            from matplotlib.figure import Figure
            from matplotlib.layout_engine import ConstrainedLayoutEngine

            # One below the other and narrow, so that a phone hardly makes the letters smaller.
            bars_of = [len(COLOURS.keys() & values.keys()) for _, values in drawn]
            figure = Figure(figsize=(5.0, 1.6 * len(drawn)), layout=ConstrainedLayoutEngine(hspace=0.08))
            panels = figure.subplots(len(drawn), squeeze=False, height_ratios=bars_of).flatten()
            for axes, (measure, values) in zip(panels, drawn, strict=True):
                sides = [side for side in values if side in COLOURS]
                values = {side: values[side] for side in sides}
                names = [side.replace(" + ", " +\n") for side in sides]
                bars = axes.barh(names, list(values.values()), color=[COLOURS[side] for side in sides])
                axes.bar_label(bars, [f"{_shown(value)} {measure.unit}" for value in values.values()], padding=4)
                axes.set_title(measure.title, loc="left", fontweight="bold", fontsize=13)
                axes.invert_yaxis()
                axes.set_xlim(right=1.45 * max(values.values()))
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
