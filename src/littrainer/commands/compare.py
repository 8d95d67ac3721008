"""The command `littrainer compare`: why do these two runs differ?"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path

from littrainer.arguments.shown_arguments import default_texts, is_same
from littrainer.callbacks.log_history import logged_values
from littrainer.checkpoint.layout import RUN_RECORD_NAME
from littrainer.checkpoint.weights import holds_weights
from littrainer.commands.command_line import CommandParser, complain
from littrainer.commands.differences import LogComparison, compare_logs, weight_gaps, weights_in
from littrainer.commands.report_charts import ABSENT, training_charts
from littrainer.commands.report_folders import NothingToReport, Run, checkpoints_in, read_folders
from littrainer.commands.report_page import Table, page
from littrainer.errors.atomic_files import write_whole

DESCRIPTION = """\
Show where two trainings differ: in their arguments, code, data, weights at the start, versions and environment; the
first step at which they logged other values; their last metrics; and the largest difference of the weights in each
layer. The folders may be those that transformers wrote, of which less is known. Exit status: 0 if logged values and
weights are equal, 1 if they differ, 2 if a folder cannot be read.
"""
# They say where a run writes and what it is called.
NAMES_OF_THE_RUN = frozenset({"output_dir", "logging_dir", "run_name"})
# On the console; the page shows all.
MOST_LAYERS = 12
# The layer of a weight: up to its number if it is one of a list, else all but the last name.
LAYER = re.compile(r".*?\.\d+(?=\.)|.*(?=\.)")


def build_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser("littrainer compare", description=DESCRIPTION)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", nargs=2, metavar="OUTPUT_DIR", help="output_dir of a training, or a checkpoint in it")
    parser.add_argument("--html", metavar="FILE.html", help="write a page too, with charts of both")
    return parser


def main(words: Sequence[str]) -> int:
    """Run the command on what follows `littrainer compare`; returns the exit status."""
    options = build_parser().parse_args(words)
    try:
        runs, searches = read_folders(options.runs)
        if len(runs) != 2 or searches:
            return complain("compare", "give the folders of two trainings; a search, or one folder twice, is not two")
        one, other = (logged_values(run.state.log_history) for run in runs)
        logs, layers = compare_logs(one, other, {}, common_only=True), layers_of(*runs)
        verdict, tables = verdict_on(logs, layers), tables_of(runs, logs, layers)
        notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
        print("\n\n".join([verdict, *(_as_text(*table) for table in tables), *notes]))
        if options.html is not None:
            write_whole(options.html, page(runs, [], training_charts(runs), verdict=verdict, tables=tables))
            print(f"\npage: {options.html}")
    except (NothingToReport, ValueError) as error:
        return complain("compare", str(error))
    except OSError as error:
        return complain("compare", f"{options.html} cannot be written: {error.strerror}; give another --html FILE")
    return int(logs.step is not None or any((layers or {}).values()))


def causes(one: Run, other: Run) -> list[tuple[str, str, str]]:
    """Return what was not the same from the start: its name, and both values."""
    found = []
    defaults = default_texts()
    if one.arguments is not None and other.arguments is not None:
        for name in {**one.arguments, **other.arguments}:
            values = [str(run.get(name, defaults.get(name, ABSENT))) for run in (one.arguments, other.arguments)]
            # One side may have arguments that the other side does not know.
            if name not in NAMES_OF_THE_RUN and ABSENT not in values and not is_same(*values):
                found.append((name, values[0], values[1]))
    if all("littrainer" in run.environment for run in (one, other)):
        for name in {**one.environment, **other.environment}:
            values = [run.environment.get(name, ABSENT) for run in (one, other)]
            # A run that only saved its state at the end does not know its first weights.
            if values[0] != values[1] and (name != "weights at the start" or ABSENT not in values):
                found.append((name, values[0], values[1]))
    return found


def layers_of(one: Run, other: Run) -> dict[str, float] | None:
    """Return the largest difference of the weights in each layer; None if one of the runs has no weights.

    Raises:
        ValueError: a file of weights is damaged.
    """
    found = [_folders_with_weights(run) for run in (one, other)]
    common = [name for name in found[0] if name in found[1]]
    if not all(found):
        return None
    chosen = [folders[common[0]] if common else next(iter(folders.values())) for folders in found]
    layers: dict[str, float] = {}
    for name, gap in weight_gaps(*map(weights_in, chosen)).items():
        match = LAYER.match(name)
        layer = match[0] if match else name
        layers[layer] = max(layers.get(layer, 0.0), gap)
    return layers


def _folders_with_weights(run: Run) -> dict[str, Path]:
    """The run's folder, under no name, and its checkpoints, the newest first."""
    places = {"": run.folder, **{path.name: path for path in reversed(checkpoints_in(run.folder))}}
    return {name: path for name, path in places.items() if holds_weights(path)}


def not_compared(one: Run, other: Run) -> list[str]:
    """Say what could not be compared."""
    notes = []
    if not all("littrainer" in run.environment for run in (one, other)):
        notes.append(f"Code, data, versions and environment, which runs with a {RUN_RECORD_NAME} have noted.")
    steps = [{entry.get("step") for entry in run.state.log_history} for run in (one, other)]
    if steps[0] != steps[1]:
        common = len(steps[0] & steps[1])
        notes.append(
            f"Steps that one run alone has logged: of {len(steps[0])} and {len(steps[1])}, {common} are common."
        )
    if not all(map(_folders_with_weights, (one, other))):
        notes.append("Weights: one of the runs has none in its folder or its checkpoints.")
    return notes


def verdict_on(logs: LogComparison, layers: dict[str, float] | None) -> str:
    """Say in a sentence what came out."""
    if logs.step is not None:
        name, (one, other) = next(iter(logs.differing.items()))
        told = f"The logs differ first at step {logs.step}: {name} is {one} and {other}"
        return f"{told}. {logs.equal} values before it are equal."
    if any((layers or {}).values()):
        return f"The weights differ, and all {logs.equal} values that both have logged are equal."
    return f"Equal: {logs.equal} logged values{'' if layers is None else ' and all weights'}."


def tables_of(runs: Sequence[Run], logs: LogComparison, layers: dict[str, float] | None) -> list[Table]:
    """Return what was found as tables: the first difference, what differs from the start, last values and layers."""
    names = [run.name for run in runs]
    tables: list[Table] = []
    if logs.step is not None:
        rows = [(name, *map(str, pair)) for name, pair in logs.differing.items()]
        tables.append((f"First difference, at step {logs.step}", ("", *names), rows))
    found = causes(runs[0], runs[1]) or [("nothing that is known", "", "")]
    tables.append(("What differs from the start", ("", *names), found))
    ends = []
    for run in runs:
        logged = logged_values(run.state.log_history)
        ends.append({name: value for step in sorted(logged) for name, value in logged[step].items()})
    metrics = [
        (name, f"{value:.8g}", f"{ends[1][name]:.8g}", f"{ends[1][name] - value:+.3g}")
        for name, value in ends[0].items()
        if isinstance(value, (int, float)) and isinstance(ends[1].get(name), (int, float))
    ]
    tables.append(("Last values", ("", *names, "difference"), metrics))
    differing = sorted(((name, gap) for name, gap in (layers or {}).items() if gap), key=lambda layer: -layer[1])
    if differing:
        title = f"Weights: {len(differing)} of {len(layers or {})} layers differ"
        texts = [(name, f"{gap:.3g}" if math.isfinite(gap) else "another shape, or nan") for name, gap in differing]
        tables.append((title, ("layer", "largest difference"), texts))
    notes = not_compared(runs[0], runs[1])
    return [*tables, ("Not compared", ("",), [(note,) for note in notes])] if notes else tables


def _as_text(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [*([headings] if any(headings) else []), *(rows[:MOST_LAYERS] if "layer" in headings else rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(headings))]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join([title, *(f"  {line}".rstrip() for line in padded)])
