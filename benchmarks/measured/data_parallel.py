"""How much of the speed of two processes is left when they train together?

Each process trains on batches of 8 of its own, over gloo, with one thread. Efficiency is the time of a step of one
process alone as a share of that of two together: 1 where exchanging gradients, and what a trainer does besides, takes
no time. The processes get the variables that torchrun sets.
"""

from __future__ import annotations

import statistics
import tempfile

from ..benchmark import Benchmark, Case, Measured, Processes
from ..figures import Figures, markdown
from ..jobs import JOBS
from ..sides import OURS, RAW, THEIRS, Side
from ..trainings import Plan, clocked

SIDES = (RAW, OURS, THEIRS)


def measure(side: Side, job: str, steps: int, warmup: int) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        # As DistributedDataParallel has it by default. The backend is gloo on CPU without asking.
        further = {"ddp_find_unused_parameters": False}
        return clocked(side, Plan(JOBS[job], folder, steps, arguments=further), warmup).per_step()


def cases(jobs: dict[str, int], warmup: int) -> tuple[Case, ...]:
    return tuple(
        Case(
            f"{job}-{number}",
            JOBS[job].title,
            SIDES,
            {"job": job, "steps": steps, "warmup": warmup},
            processes,
        )
        for job, steps in jobs.items()
        for number, processes in ((1, Processes.KEPT), (2, Processes.PAIR))
    )


def table(figures: Figures) -> str:
    rows = []
    for job in dict.fromkeys(figures.setting(case, "job") for case in figures.cases):
        alone, together = f"{job}-1", f"{job}-2"
        for side in figures.sides(alone):
            ones, twos = (figures.values(case, side, "wall_us") for case in (alone, together))
            shares = [one / two for one, two in zip(ones, twos, strict=True)]
            rows.append(
                (
                    figures.title(alone),
                    "raw DDP" if side == RAW.name else figures.shown(side),
                    f"{statistics.median(ones):.0f}",
                    f"{statistics.median(twos):.0f}",
                    figures.spread(together, side, "wall_us"),
                    f"{figures.median(together, side, 'cpu_us'):.0f}",
                    f"{statistics.median(shares):.2f}",
                )
            )
    columns = (
        "model",
        "side",
        "wall us a step, alone",
        "wall us, two together",
        "range",
        "CPU us, of one of the two",
        "efficiency",
    )
    return markdown(columns, rows, names=2)


BENCHMARK = Benchmark(
    name="data_parallel",
    question="How much of the speed of two processes is left when they train together?",
    measure=measure,
    full=cases({"mlp": 220, "tiny-bert": 25}, warmup=5),
    short=cases({"mlp": 4}, warmup=1),
    rounds=4,
    tables={"data-parallel": table},
)
