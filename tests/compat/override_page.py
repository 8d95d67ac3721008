"""The override points in docs/api/compatibility.md: `python -m tests.compat.override_page FILE` writes the table.

It is measured: what the scenarios in tests/fidelity/cases/overrides.py note with our Trainer, which the fidelity tests
compare with what they note with transformers' own.
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


def measured_calls(folder: Path) -> list[dict[str, dict[str, int]]]:
    """What both scenarios note with our Trainer: method -> its calls written out -> their number."""
    calls = []
    before = Path.cwd()
    for script in (overriding_every_method_and_calling_the_parents, overriding_every_method_while_resuming):
        place = folder / script.__name__
        place.mkdir()
        os.chdir(place)
        try:
            random.seed(20)
            np.random.seed(20)
            torch.manual_seed(20)
            calls.append(script(Side(OURS, "automatic", place)).extra["calls"])
        finally:
            os.chdir(before)
    return calls


def rows(calls: list[dict[str, dict[str, int]]]) -> str:
    """The rows of the table."""
    found = []
    for name in sorted(OVERRIDE_POINTS):
        made = [of_run.get(name, {}) for of_run in calls]
        if any(made):
            numbers = " / ".join(str(sum(ways.values())) for ways in made)
            found.append(f"| `{name}` | {numbers} | {_written(made)} |\n")
    return "".join(found)


def _written(made: list[Mapping[str, int]]) -> str:
    # Shapes and the columns of the batch are the example's own.
    generic = dict.fromkeys(
        re.sub(r"(int64|float32)\[[^]]*\]", "tensor", re.sub(r"\{[^}]*\}", "dict", way))
        for ways in made
        for way in ways
    )
    return "<br>".join(f"`{way}`" for way in generic)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        new = rows(measured_calls(Path(folder)))
        path.write_text(TABLE.sub(lambda _: new, path.read_text("utf-8")), "utf-8")
