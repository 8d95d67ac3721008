"""Each example that a test runs, with settings that make it short, and what it has to print and to leave.

The examples of one process run one after the other in it: `PROCESSES` says which. A further example is a row there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from littrainer.cli import main
from littrainer.search.record import best_of, read_record


class Example(NamedTuple):
    """One example at a small setting.

    Parameters:
        name: of its file, without .py.
        options: behind it on the command line, besides `--output_dir out`.
        rows: what the rows of the table that it ends with are called, baselines first.
        columns: numbers in each of these rows.
        leaves: files in its output folder.
        prints: regular expressions that each match something on its standard output.
        also: what else is checked, with the folder that it ran in and its standard output.
    """

    name: str
    options: str
    rows: tuple[str, ...]
    columns: int = 1
    leaves: tuple[str, ...] = ("model.safetensors",)
    prints: tuple[str, ...] = (r"^model: +out",)
    also: Callable[[Path, str], None] | None = None


def rows_of(printed: str, example: Example) -> dict[str, list[float]]:
    """The numbers of the table at the end, by what a row is called."""
    found = {}
    for name in example.rows:
        match = re.search(rf"^{re.escape(name)} +(.+)$", printed, re.MULTILINE)
        found[name] = [float(number) for number in re.findall(r"\d+\.\d+", match[1])] if match else []
    return found


def the_search_is_recorded(folder: Path, printed: str) -> None:
    """The trial that the example trains with afterwards is the best one of the record in its folder."""
    (found,) = re.findall(r"^(\S+) \(trial (\d)\) +[01]\.\d{3}$", printed, re.MULTILINE)
    told = (folder / "stderr").read_text()
    assert len(re.findall(r"^\[littrainer\] trial \d \(\d of 3\)", told, re.MULTILINE)) == 3
    stored = read_record(folder / "out")
    (best,) = best_of(stored.trials, stored.directions)
    assert len(stored.trials) == 3 and stored.backend == "optuna"
    assert found == (f"{best.parameters['learning_rate']:.2e}", best.id)
    assert main(["report", str(folder / "out")]) == 0
    assert f"Best trial: {best.id}" in (folder / "out" / "report.html").read_text()


PROCESSES: dict[str, tuple[Example, ...]] = {
    "texts": (
        Example(
            "hyperparameter_search",
            "--trials 3 --labels 2 --texts 160 --epochs 1",
            rows=("5.00e-05 (default)",),
            leaves=(),
            prints=(r"^trials: out ",),
            also=the_search_is_recorded,
        ),
    ),
}
