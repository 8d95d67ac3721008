"""Table of override points in docs/api/compatibility.md: `python -m tests.compat.override_page FILE` writes it.

The calls are recorded by the scenarios in tests/fidelity/cases/overrides.py.
"""

from __future__ import annotations

import os
import random
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from tests.fidelity.cases.overrides import (
    overriding_every_method_and_calling_the_parents,
    overriding_every_method_while_resuming,
)
from tests.fidelity.side import OURS, Side
from tests.scenarios.overrides import OVERRIDE_POINTS

TABLE = re.compile(r"(?<=\| method \| calls \| arguments \|\n\| --- \| ---: \| --- \|\n)(\|.*\n)+")


def record_calls(folder: Path) -> list[dict[str, dict[str, int]]]:
    """Return for both scenarios: method -> formatted call -> number of calls."""
    calls = []
    cwd = Path.cwd()
    for script in (overriding_every_method_and_calling_the_parents, overriding_every_method_while_resuming):
        run_folder = folder / script.__name__
        run_folder.mkdir()
        os.chdir(run_folder)
        try:
            random.seed(20)
            np.random.seed(20)
            torch.manual_seed(20)
            calls.append(script(Side(OURS, "automatic", run_folder)).extra["calls"])
        finally:
            os.chdir(cwd)
    return calls


def format_rows(calls: list[dict[str, dict[str, int]]]) -> str:
    rows = []
    for name in sorted(OVERRIDE_POINTS):
        counts_by_run = [run.get(name, {}) for run in calls]
        if any(counts_by_run):
            numbers = " / ".join(str(sum(counts.values())) for counts in counts_by_run)
            rows.append(f"| `{name}` | {numbers} | {_format_calls(counts_by_run)} |\n")
    return "".join(rows)


def _format_calls(counts_by_run: list[Mapping[str, int]]) -> str:
    # Without the shapes and columns of the example.
    generic = dict.fromkeys(
        re.sub(r"(int64|float32)\[[^]]*\]", "tensor", re.sub(r"\{[^}]*\}", "dict", call))
        for counts in counts_by_run
        for call in counts
    )
    return "<br>".join(f"`{call}`" for call in generic)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        new = format_rows(record_calls(Path(folder)))
        path.write_text(TABLE.sub(lambda _: new, path.read_text("utf-8")), "utf-8")
