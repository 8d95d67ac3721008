"""How long is it from the call of `train()` to its first step, and from its last step to its end?

The first training of a process pays for what libraries load and set up when they are first used; a later one shows what
remains. Timed are the call of `train()` (for Lightning the making of its Trainer and `fit`) up to a callback at the
first step's beginning, and from the last step's end until the call returns. Model, data and Trainer stand before.
"""

from __future__ import annotations

import tempfile
import time

import torch

from ..benchmark import Benchmark, Case, Measured, Processes
from ..figures import Figures, markdown
from ..jobs import JOBS
from ..sides import EVERY_SIDE, LIGHTNING, OURS, RAW, THEIRS, Side
from ..trainings import Plan, prepared_training, silenced

WITHOUT_RAW = tuple(side for side in EVERY_SIDE if side is not RAW)


class Repeated(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """One sample again and again, so that a long dataset takes no memory."""

    def __init__(self, sample: dict[str, torch.Tensor], count: int) -> None:
        self.sample, self.count = sample, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.sample


def measure(side: Side, job: str, steps: int, samples: int) -> Measured:
    """Milliseconds until the first step, after the last one, and of the whole call."""
    begun: list[tuple[float, float]] = []
    ended: list[tuple[float, float]] = []

    def now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def step_begins() -> None:
        if not begun:
            begun.append(now())

    def step_ended() -> None:
        ended[:] = [now()]

    with tempfile.TemporaryDirectory() as folder, silenced():
        data = Repeated(JOBS[job].samples(1)[0], samples)
        plan = Plan(JOBS[job], folder, steps, samples=data)
        train = prepared_training(side, plan, {"step_begin": step_begins, "step_end": step_ended})
        called = now()
        train()
        returned = now()
    found: Measured = {}
    for index, clock in enumerate(("wall", "cpu")):
        found[f"first_step_{clock}_ms"] = (begun[0][index] - called[index]) * 1e3
        found[f"end_{clock}_ms"] = (returned[index] - ended[0][index]) * 1e3
        found[f"whole_{clock}_ms"] = (returned[index] - called[index]) * 1e3
    return found


def calls(job: str, processes: Processes, rounds: int | None) -> tuple[Case, ...]:
    title = JOBS[job].title
    first = {"job": job, "steps": 2, "samples": 16}
    return (
        Case(f"{job}-first", f"{title}: first training of a process", WITHOUT_RAW, first, processes, rounds=rounds),
        Case(f"{job}-later", f"{title}: later training", WITHOUT_RAW, first),
    )


def curves(samples: tuple[int, ...], steps: tuple[int, ...]) -> tuple[Case, ...]:
    return (
        *(
            Case(
                f"samples-{number}",
                f"{number} samples",
                (OURS, THEIRS, LIGHTNING),
                {"job": "mlp", "steps": 2, "samples": number},
                curve="samples",
                rounds=3,
            )
            for number in samples
        ),
        *(
            Case(
                f"steps-{number}",
                f"{number} steps",
                (RAW, OURS, THEIRS, LIGHTNING),
                {"job": "mlp", "steps": number, "samples": number * 8},
                curve="steps",
                rounds=3,
            )
            for number in steps
        ),
    )


def table(figures: Figures) -> str:
    rows = []
    for case in figures.cases:
        if figures.cases[case]["curve"]:
            continue
        for side in figures.sides(case):
            rows.append(
                (
                    figures.title(case),
                    figures.shown(side),
                    f"{figures.median(case, side, 'first_step_cpu_ms'):.1f}",
                    figures.spread(case, side, "first_step_cpu_ms", ".1f"),
                    f"{figures.median(case, side, 'first_step_wall_ms'):.1f}",
                    f"{figures.ratio(case, side, THEIRS.name, 'first_step_cpu_ms'):.2f}",
                    f"{figures.median(case, side, 'end_cpu_ms'):.1f}",
                )
            )
    columns = (
        "training",
        "side",
        "CPU ms to the first step",
        "range",
        "wall ms",
        "as a multiple of transformers'",
        "CPU ms from the last step to the end",
    )
    return markdown(columns, rows, names=2)


BENCHMARK = Benchmark(
    name="startup",
    question="How long is it from the call of train() to its first step, and from its last step to its end?",
    measure=measure,
    full=(
        *calls("mlp", Processes.FRESH, rounds=2),
        calls("bert", Processes.FRESH, rounds=2)[-1],
        *curves((1_000, 30_000, 1_000_000), (10, 100, 300, 600)),
    ),
    short=(*calls("mlp", Processes.KEPT, rounds=None), *curves((100, 1_000), (2, 20))),
    rounds=7,
    tables={"startup": table},
)
