"""How much memory does a process take that imports, trains and saves once?

Each training runs in a process of its own; its peak is the largest resident set that the process reached.
"""

from __future__ import annotations

import tempfile

from ..benchmark import Benchmark, Case, Measured, Processes
from ..figures import Figures, markdown
from ..jobs import JOBS
from ..sides import EARLIER, OURS, THEIRS, Side
from ..stopwatch import MIB, largest_resident_bytes
from ..trainings import Plan, clocked


def measure(side: Side, job: str, steps: int) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        clocked(side, Plan(JOBS[job], folder, steps, arguments={"save_strategy": "steps", "save_steps": steps}), 1)
    return {"peak_mib": largest_resident_bytes() / MIB}


def cases(jobs: tuple[str, ...], steps: int, processes: Processes) -> tuple[Case, ...]:
    sides = (THEIRS, EARLIER, OURS)
    return tuple(Case(job, JOBS[job].title, sides, {"job": job, "steps": steps}, processes) for job in jobs)


def table(figures: Figures) -> str:
    rows = []
    for case in figures.cases:
        for side in figures.sides(case):
            peak, ratio = figures.median(case, side, "peak_mib"), figures.ratio(case, side, THEIRS.name, "peak_mib")
            spread = figures.spread(case, side, "peak_mib")
            rows.append((figures.title(case), figures.shown(side), f"{peak:.0f}", spread, f"{ratio:.3f}"))
    return markdown(("model", "side", "peak, MiB", "range", "ratio"), rows, names=2)


BENCHMARK = Benchmark(
    name="training_memory",
    question="How much memory does a process take that imports, trains and saves once?",
    measure=measure,
    full=cases(("mlp", "memory-bert"), steps=10, processes=Processes.FRESH),
    short=cases(("mlp",), steps=2, processes=Processes.KEPT),
    rounds=1,
    tables={"training-memory": table},
)
