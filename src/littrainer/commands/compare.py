"""The command `littrainer compare`: shows the first difference between two runs, and its causes."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

from littrainer.arguments.shown_arguments import format_defaults, is_same
from littrainer.checkpoint.layout import RUN_RECORD_NAME, list_checkpoints
from littrainer.checkpoint.weights import has_weights
from littrainer.commands.command_line import BAD_INPUT, BadInput, CommandParser
from littrainer.commands.differences import LogComparison, compare_logs, compute_weight_gaps, load_saved_weights
from littrainer.commands.report_charts import ABSENT, build_training_charts
from littrainer.commands.report_folders import FIRST_WEIGHTS, Run, load_folders
from littrainer.commands.report_page import Table, render_page
from littrainer.runtime.atomic_files import write_atomically

DESCRIPTION = """\
Show where two trainings differ: in their arguments, code, data, weights at the start, versions and environment; the
first step at which they logged other values; their last metrics; and the largest difference of the weights in each
layer. The folders may be those that transformers wrote, of which less is known. Exit status: 0 if logged values and
weights are equal, 1 if they differ, 2 if a folder cannot be read, or the runs have no step and no weights in common.
"""
RUN_IDENTIFIERS = frozenset({"output_dir", "logging_dir", "run_name", "local_rank"})
# A weight's layer: up to the index in a list of layers, else all but the last name.
LAYER = re.compile(r".*?\.\d+(?=\.)|.*(?=\.)|.*")


def main(words: Sequence[str]) -> int:
    parser = CommandParser("compare", DESCRIPTION, usage="littrainer compare [-h] [--html FILE.html] RUN_A RUN_B")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="output_dir of a training, or a checkpoint in it")
    parser.add_argument("--html", metavar="FILE.html", help="write a page too, with charts of both")
    options = parser.parse_args(words)
    runs, searches = load_folders(options.runs) if len(options.runs) == 2 else ([], [])
    if len(runs) != 2 or searches:
        raise BadInput("give the folders of two trainings; a search, or one folder twice, is not two")
    logs = compare_logs(runs[0].logged, runs[1].logged, {}, common_only=True)
    try:
        folders, layers = _compare_layers(*runs)
        status, verdict = _get_verdict(logs, layers)
        tables = _build_tables(runs, logs, folders, layers)
        notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
        print("\n\n".join([verdict, *map(_format_table, tables), *notes]))
        if options.html is not None:
            write_atomically(
                options.html, render_page(runs, [], build_training_charts(runs), verdict=verdict, tables=tables)
            )
            print(f"\npage: {options.html}")
        return status
    except (ValueError, OSError) as error:
        raise BadInput(str(error)) from error


def _get_verdict(logs: LogComparison, layers: dict[str, float]) -> tuple[int, str]:
    if logs.step is not None:
        name, (left, right) = next(iter(logs.differing.items()))
        difference = f"The logs differ first at step {logs.step}: {name} is {left} and {right}."
        before = f"{logs.equal} values before it are equal." if logs.equal else "No value before it is equal."
        return 1, f"{difference} {before}"
    if any(layers.values()):
        return 1, f"The weights differ, and all {logs.equal} values that both have logged are equal."
    if not logs.equal and not layers:
        return BAD_INPUT, "The runs cannot be compared: no step was logged by both, and not both have weights."
    return 0, f"Equal: {logs.equal} logged values{' and all weights' if layers else ''}."


def find_causes(left: Run, right: Run) -> list[tuple[str, str, str]]:
    """Return the name and both values of each argument and fact that differs."""
    causes = []
    if left.arguments is not None and right.arguments is not None:
        texts, others = ({**format_defaults(), **arguments} for arguments in (left.arguments, right.arguments))
        # Runs of different releases may have different arguments.
        names = [name for name in texts if name in others and name not in RUN_IDENTIFIERS]
        causes = [(name, texts[name], others[name]) for name in names if not is_same(texts[name], others[name])]
    if _have_environments(left, right):
        for name in {**left.environment, **right.environment}:
            values = left.environment.get(name, ABSENT), right.environment.get(name, ABSENT)
            if values[0] != values[1] and (name != FIRST_WEIGHTS or ABSENT not in values):
                causes.append((name, *values))
    return causes


def _compare_layers(left: Run, right: Run) -> tuple[str, dict[str, float]]:
    """Return the folders of the weights, and the largest difference in each layer."""
    folders = [[run.folder, *list_checkpoints(run.folder)] for run in (left, right)]
    pairs = [*itertools.product(*(filter(has_weights, candidates) for candidates in folders))]
    if not pairs:
        return "", {}
    common = [pair for pair in pairs if pair[0].relative_to(left.folder) == pair[1].relative_to(right.folder)]
    first, second = [*common, *pairs][0]
    layers: dict[str, float] = {}
    for weight, gap in compute_weight_gaps(load_saved_weights(first), load_saved_weights(second)).items():
        layer = LAYER.match(weight)[0]  # type: ignore[index]
        layers[layer] = max(layers.get(layer, 0.0), gap)
    return f"{first} and {second}", layers


def _build_tables(runs: Sequence[Run], logs: LogComparison, folders: str, layers: dict[str, float]) -> list[Table]:
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
    steps, other_steps = ({step for step, _ in run.logged} for run in runs)
    skipped = []
    if not _have_environments(*runs):
        skipped.append(("code, data, versions, environment", f"one of the runs has no {RUN_RECORD_NAME}"))
    if steps != other_steps:
        common = f"of {len(steps)} and {len(other_steps)}, {len(steps & other_steps)} are common"
        skipped.append(("steps of one run alone", common))
    if not layers:
        skipped.append(("weights", "one of the runs has none in its folder or its checkpoints"))
    tables = [
        Table(f"First difference, at step {logs.step}", ("", *names), first),
        Table("What differs from the start", ("", *names), find_causes(*runs) or [("nothing that is known", "", "")]),
        Table("Last values", ("", *names, "difference"), metrics),
        Table(
            f"Weights in {folders}: {len(gaps)} of {len(layers)} layers differ", ("layer", "largest difference"), gaps
        ),
        Table("Not compared", ("what", "why"), skipped),
    ]
    return [table for table in tables if table.rows]


def _have_environments(*runs: Run) -> bool:
    return all("littrainer" in run.environment for run in runs)


def _format_table(table: Table) -> str:
    widths = [max(map(len, column)) for column in zip(table.headings, *table.rows, strict=True)]
    padded = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in (table.headings, *table.rows))
    return "\n  ".join([table.title, *padded])
