"""How many samples per second does each side train and evaluate, on small transformers?

Training is timed as in the step benchmark, from the end of the warm-up on. Evaluation is a whole call; classifiers
compute accuracy from all logits, the language model its loss.
"""

from __future__ import annotations

import tempfile

from ..benchmark import Benchmark, Case, Measured
from ..evaluations import BATCH_SIZE, prepared_evaluation
from ..figures import Figures, markdown
from ..jobs import JOBS
from ..sides import EVERY_SIDE, THEIRS, Side
from ..stopwatch import timed
from ..trainings import Plan, clocked, silenced


def measure(side: Side, job: str, mode: str, batches: int, warmup: int = 0) -> Measured:
    """Samples of a second of processor time and by the clock on the wall."""
    with tempfile.TemporaryDirectory() as folder:
        if mode == "train":
            per_step = clocked(side, Plan(JOBS[job], folder, batches, BATCH_SIZE), warmup).per_step()
            seconds = {clock: per_step[f"{clock}_us"] / 1e6 for clock in ("wall", "cpu")}
        else:
            evaluate = prepared_evaluation(side, JOBS[job], batches, folder)
            with silenced():
                evaluate()
                took = timed(evaluate)
            seconds = {clock: took[f"{clock}_s"] / batches for clock in ("wall", "cpu")}
    return {f"{clock}_samples": BATCH_SIZE / value for clock, value in seconds.items()}


def cases(batches: int, warmup: int) -> tuple[Case, ...]:
    return tuple(
        Case(
            f"{job}-{mode}",
            f"{JOBS[job].title}: {word}",
            EVERY_SIDE,
            {"job": job, "mode": mode, "batches": batches, "warmup": warmup},
        )
        for job in ("tiny-bert", "tiny-gpt2")
        for mode, word in (("train", "training"), ("eval", "evaluation"))
    )


def table(figures: Figures) -> str:
    rows = []
    for case in figures.cases:
        for side in figures.sides(case):
            rows.append(
                (
                    figures.title(case),
                    figures.shown(side),
                    f"{figures.median(case, side, 'cpu_samples'):.0f}",
                    figures.spread(case, side, "cpu_samples"),
                    f"{figures.median(case, side, 'wall_samples'):.0f}",
                    f"{figures.ratio(case, side, THEIRS.name, 'cpu_samples'):.2f}",
                )
            )
    columns = ("model", "side", "samples per CPU second", "range", "per wall second", "as a multiple of transformers'")
    return markdown(columns, rows, names=2)


BENCHMARK = Benchmark(
    name="throughput",
    question="How many samples per second are trained and evaluated?",
    measure=measure,
    full=cases(batches=20, warmup=4),
    short=cases(batches=3, warmup=1),
    rounds=5,
    tables={"throughput": table},
)
