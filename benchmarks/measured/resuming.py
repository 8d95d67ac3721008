"""How long does a training take to go on from a checkpoint, when it was broken off after many steps?

A training writes a checkpoint after some steps of one long epoch. Timed is the call of
`train(resume_from_checkpoint=...)` up to a callback at the first new step: reading the checkpoint and leaving out the
data that was trained on. A `lightning.Trainer` starts the epoch's data anew, so it is no side here.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from ..benchmark import Benchmark, Case, Measured
from ..figures import Figures, markdown
from ..jobs import JOBS
from ..sides import THEIRS, TRAINERS, Side
from ..trainings import Plan, prepared_training, silenced

NEW_STEPS = 2
# Folders of this process by side, job and steps, with the checkpoint that later rounds resume from again.
written: dict[tuple[str, str, int], tempfile.TemporaryDirectory[str]] = {}


def measure(side: Side, job: str, skipped: int) -> Measured:
    """Milliseconds until the first new step."""
    steps = skipped + NEW_STEPS
    samples = JOBS[job].samples(steps * 8)
    key = side.name, job, skipped
    saving = {"save_strategy": "steps", "save_steps": skipped}
    if key not in written:
        written[key] = tempfile.TemporaryDirectory()
        plan = Plan(JOBS[job], written[key].name, steps, samples=samples, arguments=saving)
        with silenced():
            prepared_training(side, plan, {})()
    checkpoint = Path(written[key].name) / f"checkpoint-{skipped}"
    begun: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder, silenced():
        going_on = {**saving, "resume_from_checkpoint": str(checkpoint)}
        plan = Plan(JOBS[job], folder, steps, samples=samples, arguments=going_on)
        train = prepared_training(
            side, plan, {"step_begin": lambda: begun.append((time.perf_counter(), time.process_time()))}
        )
        called = time.perf_counter(), time.process_time()
        train()
    if len(begun) != NEW_STEPS:
        raise RuntimeError(
            f"{side.name} took {len(begun)} steps after {skipped} were done, where {NEW_STEPS} were left"
        )
    return {"wall_ms": (begun[0][0] - called[0]) * 1e3, "cpu_ms": (begun[0][1] - called[1]) * 1e3}


def cases(skipped: tuple[int, ...]) -> tuple[Case, ...]:
    return tuple(
        Case(f"skipped-{number}", JOBS["mlp"].title, TRAINERS, {"job": "mlp", "skipped": number}, curve="skipped")
        for number in skipped
    )


def table(figures: Figures) -> str:
    rows = []
    for case in figures.cases:
        for side in figures.sides(case):
            rows.append(
                (
                    figures.shown(side),
                    str(figures.setting(case, "skipped")),
                    f"{figures.median(case, side, 'cpu_ms'):.1f}",
                    figures.spread(case, side, "cpu_ms", ".1f"),
                    f"{figures.median(case, side, 'wall_ms'):.1f}",
                    f"{figures.ratio(case, side, THEIRS.name, 'cpu_ms'):.2f}",
                )
            )
    columns = ("side", "steps skipped", "CPU ms", "range", "wall ms", "as a multiple of transformers'")
    return markdown(columns, rows)


BENCHMARK = Benchmark(
    name="resuming",
    question="How long does a training take to go on from a checkpoint?",
    measure=measure,
    full=cases((10, 200, 800)),
    short=cases((2, 20)),
    rounds=5,
    tables={"resuming": table},
)
