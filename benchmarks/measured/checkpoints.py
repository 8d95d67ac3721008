"""How long does the step loop stand still for a checkpoint?

Each side trains the same model with AdamW and saves every few steps: model, optimizer, schedule and random states, with
save_total_limit, so that each save deletes an older checkpoint. The stall is the time from the end of a step that saves
to the beginning of the next one, less what stands there at steps that do not save. littrainer's includes checksums,
fsync and the rename; transformers writes in place and leaves the files to the page cache. What fsync takes is for the
disk to say, so one side leaves it out. The disk is flushed between turns. "Of the first one" is of the first save of
each training, in which a background save also allocates the memory for its copy. "In all" is what one save adds to the
whole training: the wait for the last one, and steps that are slower during a write, are in it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from ..benchmark import Benchmark, Case, Measured
from ..figures import Figures, markdown
from ..jobs import JOBS
from ..sides import OURS, THEIRS, Side
from ..trainings import Plan, prepared_training, silenced

IN_BACKGROUND = Side("littrainer, async_save", "littrainer", variant="async_save")
WITHOUT_FSYNC = Side("littrainer, without fsync", "littrainer", variant="without fsync")
BATCH_SIZE = 2


@dataclass
class StepTimes:
    """When steps began and ended, in seconds."""

    begun: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    finished: float = 0.0

    def gaps(self) -> list[float]:
        """From the end of each step to the beginning of the next; after the last one to the end of training."""
        return [later - earlier for earlier, later in zip(self.ended, [*self.begun[1:], self.finished], strict=True)]


def measure(side: Side, job: str, saves: int, steps_between: int, kept: int) -> Measured:
    """Milliseconds that a save takes.

    Parameters:
        saves: Before the end, which saves once more.
        kept: save_total_limit. Saves until so many are there do not count.
    """
    times = StepTimes()
    # The last steps save nothing, so that each save is followed by a step.
    steps = saves * steps_between + steps_between - 1
    arguments = {
        "save_strategy": "steps",
        "save_steps": steps_between,
        "save_total_limit": kept,
        **({"async_save": True} if side.variant == IN_BACKGROUND.variant else {}),
    }
    leaves_out = side.variant == WITHOUT_FSYNC.variant
    fsync = mock.patch("os.fsync", lambda descriptor: None) if leaves_out else nullcontext()
    with tempfile.TemporaryDirectory() as folder, silenced(), fsync:
        plan = Plan(JOBS[job], folder, steps, BATCH_SIZE, arguments=arguments)
        train = prepared_training(
            side,
            plan,
            {
                "step_begin": lambda: times.begun.append(time.perf_counter()),
                "step_end": lambda: times.ended.append(time.perf_counter()),
            },
        )
        train()
        times.finished = time.perf_counter()
        # Both libraries save at the last step too, whatever the interval.
        check_checkpoints(Path(folder), steps, min(kept, saves + 1))
    os.sync()
    return measured_stalls(times, saves, steps_between, kept)


def check_checkpoints(folder: Path, last_step: int, kept: int) -> None:
    """Raise where a side did not do the work that is timed."""
    found = {path.name for path in folder.glob("checkpoint-*")}
    if f"checkpoint-{last_step}" not in found or len(found) != kept:
        raise RuntimeError(f"expected checkpoint-{last_step} and {kept} in all, found {sorted(found)}")


def measured_stalls(times: StepTimes, saves: int, steps_between: int, kept: int) -> Measured:
    gaps = times.gaps()
    saving = [number * steps_between - 1 for number in range(1, saves + 1)]
    # What the last gap holds is the end of training, a wait for a background save among it.
    quiet_gap = statistics.median(gap for index, gap in enumerate(gaps[:-1]) if index not in saving)
    # The first steps set up the optimizer; until the first save nothing is written beside a step.
    before_saves = [end - begin for begin, end in zip(times.begun, times.ended, strict=True)][1 : saving[0] + 1]
    quiet_step = statistics.median(before_saves) + quiet_gap
    after_first_step = times.finished - times.ended[0]
    in_all = (after_first_step - quiet_step * (len(gaps) - 1)) / (saves + 1)
    stalls = [gaps[index] - quiet_gap for index in saving]
    # The first save of a training is told by itself; until the limit is reached, none is deleted.
    counted = stalls[max(1, kept if kept < saves else 1) :]
    return {
        "stall_ms": statistics.median(counted) * 1e3,
        "first_ms": stalls[0] * 1e3,
        "in_all_ms": in_all * 1e3,
    }


def small(job: str, saves: int) -> Case:
    settings = {"job": job, "saves": saves, "steps_between": 3, "kept": 1}
    return Case(job, JOBS[job].title, (THEIRS, OURS, WITHOUT_FSYNC, IN_BACKGROUND), settings, rounds=6)


def large(job: str, saves: int, steps_between: int) -> Case:
    settings = {"job": job, "saves": saves, "steps_between": steps_between, "kept": 1}
    return Case(job, JOBS[job].title, (THEIRS, OURS, IN_BACKGROUND), settings)


def by_parameters(jobs: tuple[str, ...], saves: int) -> tuple[Case, ...]:
    sides = (THEIRS, OURS, IN_BACKGROUND)
    return tuple(
        Case(
            job,
            JOBS[job].title,
            sides,
            {"job": job, "saves": saves, "steps_between": 10, "kept": 1},
            curve="parameters",
            rounds=2,
        )
        for job in jobs
    )


def by_number_kept(kept: tuple[int, ...]) -> tuple[Case, ...]:
    return tuple(
        Case(
            f"kept-{number}",
            f"{number} kept",
            (THEIRS, OURS),
            {"job": "mlp", "saves": number + 5, "steps_between": 3, "kept": number},
            curve="kept",
            rounds=3,
        )
        for number in kept
    )


def table(figures: Figures) -> str:
    rows = []
    for case in figures.cases:
        if figures.cases[case]["curve"] == "kept":
            continue
        for side in figures.sides(case):
            rows.append(
                (
                    figures.title(case),
                    figures.shown(side),
                    f"{figures.median(case, side, 'stall_ms'):.1f}",
                    figures.spread(case, side, "stall_ms"),
                    f"{figures.median(case, side, 'first_ms'):.1f}",
                    f"{figures.median(case, side, 'in_all_ms'):.1f}",
                    f"{figures.ratio(case, side, THEIRS.name, 'stall_ms'):.2f}",
                )
            )
    columns = (
        "model",
        "side",
        "wall ms of a save",
        "range",
        "of the first one",
        "in all",
        "as a multiple of transformers'",
    )
    return markdown(columns, rows, names=2)


BENCHMARK = Benchmark(
    name="checkpoints",
    question="How long does the step loop stand still for a checkpoint?",
    measure=measure,
    full=(
        small("mlp", saves=16),
        small("bert", saves=16),
        large("bert-50m", saves=3, steps_between=10),
        *by_parameters(("square-1m", "square-4m", "square-17m"), saves=4),
        *by_number_kept((2, 10, 40)),
    ),
    short=(small("mlp", saves=2),),
    rounds=2,
    tables={"checkpoints": table},
)
