"""The command `littrainer compare`: the first difference between two runs, and its causes."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

from littrainer.arguments.shown_arguments import format_defaults, is_same
from littrainer.checkpoint.layout import RUN_RECORD_NAME
from littrainer.checkpoint.weights import has_weights
from littrainer.commands.command_line import BAD_INPUT, BadInput, CommandParser
from littrainer.commands.differences import LogComparison, compare_logs, load_saved_weights, weight_gaps
from littrainer.commands.report_charts import ABSENT, build_training_charts
from littrainer.commands.report_folders import FIRST_WEIGHTS, Run, identify_checkpoints, load_folders
from littrainer.commands.report_page import Table, page
from littrainer.runtime.atomic_files import write_atomically

DESCRIPTION = """\
Show where two trainings differ: in their arguments, code, data, weights at the start, versions and environment; the
first step at which they logged other values; their last metrics; and the largest difference of the weights in each
layer. The folders may be those that transformers wrote, of which less is known. Exit status: 0 if logged values and
weights are equal, 1 if they differ, 2 if a folder cannot be read, or the runs have no step and no weights in common.
"""
# Folders and names of a run, which are others in each run.
NAMES_OF_THE_RUN = frozenset({"output_dir", "logging_dir", "run_name", "local_rank"})
# The layer of a weight: up to its number if it is one of a list, else all but the last name.
LAYER = re.compile(r".*?\.\d+(?=\.)|.*(?=\.)|.*")


def main(words: Sequence[str]) -> int:
    """Run the command on the words after `littrainer compare`; returns the exit status."""
    parser = CommandParser("compare", DESCRIPTION)
    parser.add_argument("runs", nargs=2, metavar="OUTPUT_DIR", help="output_dir of a training, or a checkpoint in it")
    parser.add_argument("--html", metavar="FILE.html", help="write a page too, with charts of both")
    options = parser.parse_args(words)
    runs, searches = load_folders(options.runs)
    if len(runs) != 2 or searches:
        raise BadInput("give the folders of two trainings; a search, or one folder twice, is not two")
    logs = compare_logs(runs[0].logged, runs[1].logged, {}, common_only=True)
    try:
        places, layers = _layers_of(*runs)
        status, verdict = _verdict_on(logs, layers)
        tables = _tables_of(runs, logs, places, layers)
        notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
        print("\n\n".join([verdict, *map(_as_text, tables), *notes]))
        if options.html is not None:
            write_atomically(options.html, page(runs, [], build_training_charts(runs), verdict=verdict, tables=tables))
            print(f"\npage: {options.html}")
        return status
    except (ValueError, OSError) as error:
        raise BadInput(str(error)) from error


def _verdict_on(logs: LogComparison, layers: dict[str, float]) -> tuple[int, str]:
    """Return the exit status, and the result in a sentence."""
    if logs.step is not None:
        name, (one, other) = next(iter(logs.differing.items()))
        difference = f"The logs differ first at step {logs.step}: {name} is {one} and {other}."
        return 1, f"{difference} {logs.equal} values before it are equal."
    if any(layers.values()):
        return 1, f"The weights differ, and all {logs.equal} values that both have logged are equal."
    if not logs.equal and not layers:
        return BAD_INPUT, "The runs cannot be compared: no step was logged by both, and not both have weights."
    return 0, f"Equal: {logs.equal} logged values{' and all weights' if layers else ''}."


def causes(one: Run, other: Run) -> list[tuple[str, str, str]]:
    """Return the name and both values of each argument and fact that differed from the start."""
    found = []
    if one.arguments is not None and other.arguments is not None:
        left, right = ({**format_defaults(), **arguments} for arguments in (one.arguments, other.arguments))
        # One side may have arguments that the other side does not know.
        names = [name for name in left if name in right and name not in NAMES_OF_THE_RUN]
        found = [(name, left[name], right[name]) for name in names if not is_same(left[name], right[name])]
    if _have_noted(one, other):
        for name in {**one.environment, **other.environment}:
            values = one.environment.get(name, ABSENT), other.environment.get(name, ABSENT)
            if values[0] != values[1] and (name != FIRST_WEIGHTS or ABSENT not in values):
                found.append((name, *values))
    return found


def _layers_of(one: Run, other: Run) -> tuple[str, dict[str, float]]:
    """Return the folders of the compared weights, and the largest difference in each layer."""
    # The folder of a run, and its checkpoints, the newest first.
    folders = [[run.folder, *reversed(identify_checkpoints(run.folder))] for run in (one, other)]
    pairs = [*itertools.product(*(filter(has_weights, places) for places in folders))]
    if not pairs:
        return "", {}
    common = [pair for pair in pairs if pair[0].relative_to(one.folder) == pair[1].relative_to(other.folder)]
    left, right = [*common, *pairs][0]
    layers: dict[str, float] = {}
    for weight, gap in weight_gaps(load_saved_weights(left), load_saved_weights(right)).items():
        layer = LAYER.match(weight)[0]  # type: ignore[index]
        layers[layer] = max(layers.get(layer, 0.0), gap)
    return f"{left} and {right}", layers


def _tables_of(runs: Sequence[Run], logs: LogComparison, places: str, layers: dict[str, float]) -> list[Table]:
    """Return the first difference, what differs from the start, last values and layers as tables."""
    names = [run.name for run in runs]
    first = [(name, *map(str, pair)) for name, pair in logs.differing.items()]
    ends = [{name: value for (_, name), value in run.logged.items()} for run in runs]
    metrics = [
        (name, f"{value:.8g}", f"{ends[1][name]:.8g}", f"{ends[1][name] - value:+.3g}")
        for name, value in ends[0].items()
        if isinstance(value, (int, float)) and isinstance(ends[1].get(name), (int, float))
    ]
    differing = sorted(((name, gap) for name, gap in layers.items() if gap), key=lambda layer: -layer[1])
    gaps = [(name, f"{gap:.3g}" if math.isfinite(gap) else "another shape, or nan") for name, gap in differing]
    one, other = ({step for step, _ in run.logged} for run in runs)
    left_out = []
    if not _have_noted(*runs):
        left_out.append(("code, data, versions, environment", f"one of the runs has no {RUN_RECORD_NAME}"))
    if one != other:
        common = f"of {len(one)} and {len(other)}, {len(one & other)} are common"
        left_out.append(("steps of one run alone", common))
    if not layers:
        left_out.append(("weights", "one of the runs has none in its folder or its checkpoints"))
    tables = [
        Table(f"First difference, at step {logs.step}", ("", *names), first),
        Table("What differs from the start", ("", *names), causes(*runs) or [("nothing that is known", "", "")]),
        Table("Last values", ("", *names, "difference"), metrics),
        Table(
            f"Weights in {places}: {len(gaps)} of {len(layers)} layers differ", ("layer", "largest difference"), gaps
        ),
        Table("Not compared", ("what", "why"), left_out),
    ]
    return [table for table in tables if table.rows]


def _have_noted(*runs: Run) -> bool:
    return all("littrainer" in run.environment for run in runs)


def _as_text(table: Table) -> str:
    widths = [max(map(len, column)) for column in zip(table.headings, *table.rows, strict=True)]
    padded = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in (table.headings, *table.rows))
    return "\n  ".join([table.title, *padded])
