"""What does a trainer cost per optimizer step, over a raw PyTorch loop that does the same arithmetic?

Every side draws shuffled batches of 8, runs forward and backward, clips to norm 1, takes an AdamW step and advances a
linear schedule; none logs or saves. Time counts from the end of the last warm-up step to the end of the last step,
seen by a callback of the side's own kind: imports, construction and the end of training stay out. Models of
transformers come from the side's own release; those of the raw loop and of Lightning from the newer one.
"""

from __future__ import annotations

import tempfile
from typing import Any

from ..benchmark import Benchmark, Case, Measured
from ..figures import Figures, markdown, share
from ..jobs import JOBS
from ..sides import EVERY_SIDE, OURS, RAW, THEIRS
from ..trainings import Plan, clocked


def measure(side: Any, job: str, steps: int, warmup: int, accumulation: int = 1, bars: bool = False) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(JOBS[job], folder, steps, accumulation=accumulation, bars=bars)
        return clocked(side, plan, warmup).per_step()


def cases(steps: dict[str, int], warmup: int) -> tuple[Case, ...]:
    """The cases by the steps of a training, which are fewer where a window has four micro-batches."""
    found = []
    for job, number in steps.items():
        title = JOBS[job].title
        alone = {"job": job, "steps": number, "warmup": warmup}
        found += [
            Case(job, title, EVERY_SIDE, alone),
            Case(
                f"{job}-accumulation",
                f"{title}, 4 micro-batches a step",
                EVERY_SIDE,
                {**alone, "steps": warmup + (number - warmup) // 2, "accumulation": 4},
            ),
            Case(f"{job}-bars", f"{title}, progress bars", EVERY_SIDE, {**alone, "bars": True}),
        ]
    return tuple(found)


def grown(widths: tuple[str, ...], steps: int, warmup: int) -> tuple[Case, ...]:
    """What the loop around a model costs when the model has more parameters."""
    sides = (RAW, OURS, THEIRS)
    return tuple(
        Case(job, JOBS[job].title, sides, {"job": job, "steps": steps, "warmup": warmup}, curve="layers", rounds=3)
        for job in widths
    )


def per_case(figures: Figures) -> str:
    """Every side of every case."""
    blocks = []
    for case in figures.cases:
        if figures.cases[case]["curve"]:
            continue
        steps = figures.setting(case, "steps") - figures.setting(case, "warmup")
        rows = []
        for side in figures.sides(case):
            over, of_theirs = "", ""
            if side != RAW.name:
                more = {each: figures.difference(case, each, RAW.name, "cpu_us") for each in (side, THEIRS.name)}
                over, of_theirs = f"{more[side]:.0f}", share(more[side], more[THEIRS.name])
            rows.append(
                (
                    figures.shown(side),
                    f"{figures.median(case, side, 'cpu_us'):.0f}",
                    figures.spread(case, side, "cpu_us"),
                    f"{figures.median(case, side, 'wall_us'):.0f}",
                    over,
                    of_theirs,
                )
            )
        columns = ("side", "CPU us a step", "range", "wall us", "CPU us over the raw loop", "share of transformers'")
        blocks.append(
            f"{figures.title(case)}: {figures.number_of_rounds(case)} rounds of {steps} steps\n\n"
            + markdown(columns, rows)
        )
    return "\n".join(blocks)


BENCHMARK = Benchmark(
    name="step",
    question="What does an optimizer step cost over a raw PyTorch loop?",
    measure=measure,
    full=(
        *cases({"mlp": 320, "bert": 100}, warmup=20),
        *grown(("mlp-2-layers", "mlp-8-layers", "mlp-32-layers"), steps=120, warmup=20),
    ),
    short=(*cases({"mlp": 40}, warmup=10), *grown(("mlp-2-layers", "mlp-8-layers"), steps=20, warmup=5)),
    rounds=5,
    tables={"step": per_case},
)
