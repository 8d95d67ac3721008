"""The command `littrainer compare`: why do these two runs differ?"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from littrainer.arguments.shown_arguments import default_texts, is_same
from littrainer.checkpoint.layout import RUN_RECORD_NAME
from littrainer.checkpoint.weights import holds_weights
from littrainer.commands.command_line import CommandParser, complain
from littrainer.commands.differences import LogComparison, compare_logs, weight_gaps, weights_in
from littrainer.commands.report_charts import ABSENT, training_charts
from littrainer.commands.report_folders import FIRST_WEIGHTS, NothingToReport, Run, checkpoints_in, read_folders
from littrainer.commands.report_page import Table, page
from littrainer.errors.atomic_files import write_whole

DESCRIPTION = """\
Show where two trainings differ: in their arguments, code, data, weights at the start, versions and environment; the
first step at which they logged other values; their last metrics; and the largest difference of the weights in each
layer. The folders may be those that transformers wrote, of which less is known. Exit status: 0 if logged values and
weights are equal, 1 if they differ, 2 if a folder cannot be read.
"""
# They say where a run writes and what it is called.
NAMES_OF_THE_RUN = frozenset({"output_dir", "logging_dir", "run_name", "local_rank"})
# The layer of a weight: up to its number if it is one of a list, else all but the last name.
LAYER = re.compile(r".*?\.\d+(?=\.)|.*(?=\.)|.*")


def build_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser("littrainer compare", description=DESCRIPTION)
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
        logs, layers = compare_logs(runs[0].logged, runs[1].logged, {}, common_only=True), layers_of(*runs)
        verdict, tables = verdict_on(logs, layers), tables_of(runs, logs, layers)
        notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
        print("\n\n".join([verdict, *(_as_text(*table) for table in tables), *notes]))
        if options.html is not None:
            write_whole(options.html, page(runs, [], training_charts(runs), verdict=verdict, tables=tables))
            print(f"\npage: {options.html}")
    except (NothingToReport, ValueError, OSError) as error:
        return complain("compare", str(error))
    return int(logs.step is not None or any(layers.values()))


def causes(one: Run, other: Run) -> list[tuple[str, str, str]]:
    """Return what was not the same from the start: its name, and both values."""
    found = []
    if one.arguments is not None and other.arguments is not None:
        left, right = ({**default_texts(), **(run.arguments or {})} for run in (one, other))
        # One side may have arguments that the other side does not know.
        names = [name for name in left if name in right and name not in NAMES_OF_THE_RUN]
        found = [(name, left[name], right[name]) for name in names if not is_same(left[name], right[name])]
    if _have_noted(one, other):
        for name in {**one.environment, **other.environment}:
            values = one.environment.get(name, ABSENT), other.environment.get(name, ABSENT)
            if values[0] != values[1] and (name != FIRST_WEIGHTS or ABSENT not in values):
                found.append((name, *values))
    return found


def _have_noted(*runs: Run) -> bool:
    return all("littrainer" in run.environment for run in runs)


def layers_of(*runs: Run) -> dict[str, float]:
    """Return the largest difference of the weights in each layer; of none if one of the runs has no weights.

    Raises:
        ValueError: a file of weights is damaged.
    """
    # The run's folder, under no name, and its checkpoints, the newest first.
    places = [{"": run.folder} | {path.name: path for path in reversed(checkpoints_in(run.folder))} for run in runs]
    one, other = ({name: path for name, path in found.items() if holds_weights(path)} for found in places)
    if not one or not other:
        return {}
    name = next((name for name in one if name in other), None)
    chosen = [next(iter(found.values())) if name is None else found[name] for found in (one, other)]
    layers: dict[str, float] = {}
    for weight, gap in weight_gaps(*map(weights_in, chosen)).items():
        layer = LAYER.match(weight)[0]  # type: ignore[index]
        layers[layer] = max(layers.get(layer, 0.0), gap)
    return layers


def not_compared(one: Run, other: Run, layers: dict[str, float]) -> list[tuple[str, str]]:
    """Return what could not be compared, and why."""
    found = []
    if not _have_noted(one, other):
        found.append(("code, data, versions, environment", f"one of the runs has no {RUN_RECORD_NAME} that notes them"))
    steps, others = one.logged.keys(), other.logged.keys()
    if steps != others:
        why = f"of {len(steps)} and {len(others)}, {len(steps & others)} are common"
        found.append(("steps that one run alone has logged", why))
    if not layers:
        found.append(("weights", "one of the runs has none in its folder or its checkpoints"))
    return found


def verdict_on(logs: LogComparison, layers: dict[str, float]) -> str:
    """Say in a sentence what came out."""
    if logs.step is not None:
        name, (one, other) = next(iter(logs.differing.items()))
        told = f"The logs differ first at step {logs.step}: {name} is {one} and {other}"
        return f"{told}. {logs.equal} values before it are equal."
    if any(layers.values()):
        return f"The weights differ, and all {logs.equal} values that both have logged are equal."
    return f"Equal: {logs.equal} logged values{' and all weights' if layers else ''}."


def tables_of(runs: Sequence[Run], logs: LogComparison, layers: dict[str, float]) -> list[Table]:
    """Return what was found as tables: the first difference, what differs from the start, last values and layers."""
    names = [run.name for run in runs]
    tables: list[Table] = []
    if logs.step is not None:
        rows = [(name, *map(str, pair)) for name, pair in logs.differing.items()]
        tables.append((f"First difference, at step {logs.step}", ("", *names), rows))
    found = causes(runs[0], runs[1]) or [("nothing that is known", "", "")]
    tables.append(("What differs from the start", ("", *names), found))
    ends = [{name: value for values in run.logged.values() for name, value in values.items()} for run in runs]
    metrics = [
        (name, f"{value:.8g}", f"{ends[1][name]:.8g}", f"{ends[1][name] - value:+.3g}")
        for name, value in ends[0].items()
        if isinstance(value, (int, float)) and isinstance(ends[1].get(name), (int, float))
    ]
    tables.append(("Last values", ("", *names, "difference"), metrics))
    differing = sorted(((name, gap) for name, gap in layers.items() if gap), key=lambda layer: -layer[1])
    if differing:
        title = f"Weights: {len(differing)} of {len(layers)} layers differ"
        texts = [(name, f"{gap:.3g}" if math.isfinite(gap) else "another shape, or nan") for name, gap in differing]
        tables.append((title, ("layer", "largest difference"), texts))
    left_out = not_compared(runs[0], runs[1], layers)
    return [*tables, ("Not compared", ("what", "why"), left_out)] if left_out else tables


def _as_text(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    padded = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in (headings, *rows))
    return "\n  ".join([title, *padded])
