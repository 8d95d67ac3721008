"""How often does the host wait for a GPU, and how much of its memory does a training take?

Both are counted on the simulated CUDA device of the tests (`tests/simulated_gpu/README.md`), which counts waits and
bytes as a GPU does and says nothing about time. Waits are those beyond the model's own forward and backward passes.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from tests.simulated_gpu import measured_trainings
from tests.simulated_gpu.build import build_extension, reason_to_skip
from tests.simulated_gpu.conftest import simulated_environment
from tests.simulated_gpu.run import run_on_gpu

from ..benchmark import Benchmark, Case, Measured, Processes
from ..figures import Figures, markdown
from ..sides import OURS, THEIRS, Side
from ..stopwatch import MIB

COUNTED = ("step", "log", "evaluation")
WAITS, MEMORY = "waits", "memory"
FUNCTIONS = {WAITS: measured_trainings.measure_waits, MEMORY: measured_trainings.measure_memory}


@functools.cache
def measure_side(library: str, kind: str) -> dict[str, Any]:
    """Measure all trainings of a side in one process.

    Raises:
        RuntimeError: there is no simulated GPU here.
    """
    reason = reason_to_skip()
    if reason:
        raise RuntimeError(reason)
    build_extension()
    with tempfile.TemporaryDirectory() as folder:
        measured: dict[str, Any] = run_on_gpu(FUNCTIONS[kind], Path(folder), simulated_environment(), library)
    return measured


def measure(side: Side, kind: str, training: str) -> Measured:
    return {name: float(value) for name, value in measure_side(side.library, kind)[training].items()}


def cases(kind: str, both: list[str], ours_alone: list[str]) -> tuple[Case, ...]:
    sides = {**dict.fromkeys(both, (THEIRS, OURS)), **dict.fromkeys(ours_alone, (OURS,))}
    return tuple(
        Case(f"{kind}: {name}", name, of_case, {"kind": kind, "training": name}, Processes.NONE)
        for name, of_case in sides.items()
    )


def waits_table(figures: Figures) -> str:
    rows = []
    for case in figures.cases:
        if figures.setting(case, "kind") == WAITS:
            for side in figures.sides(case):
                numbers = [f"{figures.median(case, side, name):.0f}" for name in (*COUNTED, "model")]
                rows.append((figures.title(case), figures.shown(side), *numbers))
    return markdown(("training", "side", "a step", "a log", "an evaluation", "the model, a step"), rows, names=2)


def memory_table(figures: Figures) -> str:
    rows = []
    for case in figures.cases:
        if figures.setting(case, "kind") == MEMORY:
            for side in figures.sides(case):
                peak, left = (figures.median(case, side, name) / MIB for name in ("peak", "left"))
                has_both = THEIRS.name in figures.sides(case)
                share = f"{figures.ratio(case, side, THEIRS.name, 'peak'):.3f}" if has_both else "-"
                rows.append((figures.title(case), figures.shown(side), f"{peak:.2f}", share, f"{left:.2f}"))
    return markdown(("training", "side", "peak, MiB", "ratio", "after `del trainer`, MiB"), rows, names=2)


def failures(figures: Figures) -> list[str]:
    """Waits of our steps and logs are gated, in the tests as well."""
    return [
        f"{figures.title(case)}: {figures.median(case, OURS.name, name):.0f} waits at a {name}, at most {bound}"
        for case in figures.cases
        if figures.setting(case, "kind") == WAITS
        for name, bound in (("step", 0), ("log", 1))
        if figures.median(case, OURS.name, name) > bound
    ]


ALONE = [name for name, training in measured_trainings.TRAININGS.items() if training.uses_lightnings_loop]
WAIT_CASES = cases(WAITS, [name for name in measured_trainings.TRAININGS if name not in ALONE], ALONE)

BENCHMARK = Benchmark(
    name="simulated_gpu",
    question="How often does the host wait for a GPU, and how much of its memory does a training take?",
    measure=measure,
    full=(*WAIT_CASES, *cases(MEMORY, list(measured_trainings.MEMORY), list(measured_trainings.OURS_ALONE))),
    short=WAIT_CASES,
    rounds=1,
    tables={"device-waits": waits_table, "device-memory": memory_table},
    failures=failures,
)
