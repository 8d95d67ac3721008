"""How fast is an evaluation, and what does a call cost however little it evaluates?

A call is timed from entry to return; model, data and Trainer stand before, and the first call, which pays for caches,
does not count. "In fit" is an evaluation that `eval_steps` asks for during training. What a call costs besides its
batches is the time of a call over one batch less what a batch takes in a long one.
"""

from __future__ import annotations

import importlib
import statistics
import tempfile
from typing import Any

from torch.utils.data import default_collate

from ..benchmark import Benchmark, Case, Measured
from ..evaluations import BATCH_SIZE, prepared_evaluation
from ..figures import Figures, markdown
from ..jobs import JOBS, Job, accuracy
from ..sides import EVERY_SIDE, THEIRS, TRAINERS, Side
from ..stopwatch import timed
from ..trainings import silenced, trainer_arguments

STEPS_BETWEEN_CALLS = 2


def measure(side: Side, job: str, batches: int, calls: int, in_fit: bool = False) -> Measured:
    """Milliseconds of a call, the median of several."""
    with tempfile.TemporaryDirectory() as folder, silenced():
        if in_fit:
            took = calls_in_fit(side, JOBS[job], batches, calls, folder)
        else:
            evaluate = prepared_evaluation(side, JOBS[job], batches, folder)
            evaluate()
            took = [timed(evaluate) for _ in range(calls)]
    return {f"{clock}_ms": statistics.median(each[f"{clock}_s"] for each in took) * 1e3 for clock in ("cpu", "wall")}


def calls_in_fit(side: Side, job: Job, batches: int, calls: int, folder: str) -> list[dict[str, float]]:
    """Seconds of each evaluation that a training asks for, but for the first."""
    names = importlib.import_module(side.library)
    Trainer: Any = names.Trainer
    took: list[dict[str, float]] = []

    class Timed(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            found = []
            took.append(timed(lambda: found.append(super(Timed, self).evaluate(*args, **kwargs))))
            return found[0]

    steps = STEPS_BETWEEN_CALLS * (calls + 1)
    arguments = trainer_arguments(
        names,
        folder,
        per_device_train_batch_size=BATCH_SIZE,
        per_device_eval_batch_size=BATCH_SIZE,
        max_steps=steps,
        eval_strategy="steps",
        eval_steps=STEPS_BETWEEN_CALLS,
    )
    trainer = Timed(
        model=job.model(),
        args=arguments,
        train_dataset=job.samples(steps * BATCH_SIZE),
        eval_dataset=job.samples(batches * BATCH_SIZE),
        data_collator=default_collate,
        compute_metrics=accuracy,
    )
    trainer.train()
    return took[1:]


def cases(job: str, sizes: tuple[int, ...], short_calls: int, long_calls: int) -> tuple[Case, ...]:
    """Calls over one batch, outside of fit and in it, and over more."""
    title = JOBS[job].title
    outside = [
        Case(
            f"{job}-{batches}",
            title,
            EVERY_SIDE,
            {"job": job, "batches": batches, "calls": short_calls if batches == 1 else long_calls},
            curve=f"{job}-batches",
        )
        for batches in sizes
    ]
    in_fit = {"job": job, "batches": 1, "calls": short_calls, "in_fit": True}
    return (*outside, Case(f"{job}-in-fit", title, TRAINERS, in_fit))


def jobs_of(figures: Figures) -> list[str]:
    return list(dict.fromkeys(figures.setting(case, "job") for case in figures.cases))


def longest(figures: Figures, job: str) -> str:
    return figures.of_curve(f"{job}-batches")[-1]


def speed(figures: Figures) -> str:
    rows = []
    for job in jobs_of(figures):
        case = longest(figures, job)
        batches = figures.setting(case, "batches")
        for side in figures.sides(case):
            per_second = {
                clock: batches * BATCH_SIZE / figures.median(case, side, f"{clock}_ms") * 1e3
                for clock in ("cpu", "wall")
            }
            rows.append(
                (
                    f"{figures.title(case)}, {batches} batches",
                    figures.shown(side),
                    f"{per_second['cpu']:.0f}",
                    f"{per_second['wall']:.0f}",
                    figures.spread(case, side, "cpu_ms"),
                    f"{figures.ratio(case, THEIRS.name, side, 'cpu_ms'):.2f}",
                )
            )
    columns = (
        "evaluation",
        "side",
        "samples per CPU second",
        "per wall second",
        "CPU ms of a call, range",
        "speed as a multiple of transformers'",
    )
    return markdown(columns, rows, names=2)


def cost_of_a_call(figures: Figures) -> str:
    rows = []
    for job in jobs_of(figures):
        long_one = longest(figures, job)
        for case, place in ((f"{job}-1", "outside of fit"), (f"{job}-in-fit", "in fit")):
            for side in figures.sides(case):
                batch = figures.median(long_one, side, "cpu_ms") / figures.setting(long_one, "batches")
                call = figures.median(case, side, "cpu_ms")
                rows.append(
                    (
                        f"{figures.title(case)}, {place}",
                        figures.shown(side),
                        f"{call:.2f}",
                        figures.spread(case, side, "cpu_ms", ".2f"),
                        f"{figures.median(case, side, 'wall_ms'):.2f}",
                        f"{batch:.2f}",
                        f"{call - batch:.2f}",
                    )
                )
    columns = ("call over one batch", "side", "CPU ms", "range", "wall ms", "of it the batch", "the call itself")
    return markdown(columns, rows, names=2)


BENCHMARK = Benchmark(
    name="evaluation",
    question="How fast is an evaluation, and what does a call cost besides its batches?",
    measure=measure,
    full=(
        *cases("mlp", (1, 50, 200, 400), short_calls=12, long_calls=2),
        *cases("bert", (1, 100), short_calls=8, long_calls=1),
    ),
    short=cases("mlp", (1, 20), short_calls=3, long_calls=1),
    rounds=5,
    tables={"evaluation": speed, "evaluation-call": cost_of_a_call},
)
