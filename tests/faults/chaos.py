"""Runs whose processes are killed, stopped (SIGSTOP), raise, or find the disk full, and that come back by themselves.

    python -m tests.faults.chaos                50 schedules
    python -m tests.faults.chaos --schedules 6

Each schedule is a training of 12 optimizer steps under `littrainer run --restarts`, in one process, in two, or in two
of which one is left (`--devices 1:2`), with one to three faults at random steps. It has to end with the weights of a
run that nothing happened to: bit for bit, or, if a process is lost, within 1e-5; and each row has to be trained once in
an epoch. Work lost at a fault is counted in optimizer steps; one save interval is the bound. The full disk is injected.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.distributed.starting import run

SCRIPT = "tests.faults.faulty_run"
REPOSITORY = Path(__file__).parents[2]
ROWS, STEPS, SAVE_STEPS, GLOBAL_BATCH_SIZE = 24, 12, 3, 4
KINDS = ("kill", "stop", "raise", "disk")
# How a schedule is run -> the option, and whether one process is left in the end.
LAYOUTS = {"1 process": ("1", False), "2 processes": ("2", False), "2 -> 1": ("1:2", True)}
HANG_TIMEOUT = 4


@dataclass(frozen=True)
class Schedule:
    """A training and its faults.

    Parameters:
        devices: value of the option.
        faults: start, rank, step and kind of each.
        loses_process: it ends in other processes than it began, so without dropout.
        options: further options of `littrainer run`.
    """

    devices: str
    faults: list[tuple[int, int, int, str]]
    loses_process: bool = False
    options: tuple[str, ...] = ("--restarts", "6")

    def run(self, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run it in a folder."""
        sizes = {"per_device_train_batch_size": 2, "global_batch_size": GLOBAL_BATCH_SIZE}
        plan = {
            "faults": self.faults,
            "dropout": 0.0 if self.loses_process else 0.2,
            "arguments": {"max_steps": STEPS, "save_steps": SAVE_STEPS, "learning_rate": 0.01, **sizes},
        }
        options = ["--devices", self.devices, *self.options]
        words = ["littrainer", "run", *options, "-m", SCRIPT, str(folder), json.dumps(plan)]
        return run("-m", *words, cwd=REPOSITORY)


def undisturbed(schedule: Schedule, folder: Path) -> dict[str, torch.Tensor]:
    """The final weights of the same training without faults."""
    done = Schedule(schedule.devices, [], schedule.loses_process).run(folder)
    assert done.returncode == 0, done.stderr
    return final_weights(folder)


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "final.pt", weights_only=True)


def are_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=0, atol=tolerance) for name in other)


def steps_of(folder: Path) -> list[tuple[int, int, list[int]]]:
    """Start, optimizer step and rows of what any process has trained."""
    return [
        tuple(json.loads(line)) for path in sorted(folder.glob("steps-*")) for line in path.read_text().splitlines()
    ]


def rows_of_epochs(folder: Path) -> list[list[int]]:
    """The rows of each epoch, of those starts whose steps have lasted."""
    lasting: dict[int, int] = {}
    for start, step, _ in steps_of(folder):
        lasting[step] = max(start, lasting.get(step, 0))
    epochs: dict[int, list[int]] = collections.defaultdict(list)
    for start, step, rows in steps_of(folder):
        if lasting[step] == start:
            epochs[(step - 1) * GLOBAL_BATCH_SIZE // ROWS] += rows
    return [sorted(epochs[number]) for number in sorted(epochs)]


def most_lost(folder: Path) -> int:
    """Optimizer steps that were taken once more after a fault, at most."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for start, step, _ in steps_of(folder):
        first[start], last[start] = min(step, first.get(start, step)), max(step, last.get(start, step))
    starts = sorted(first)
    pairs = itertools.pairwise(starts)
    return max((last[one] + 1 - first[other] for one, other in pairs), default=0)


def random_schedule(generator: random.Random, layout: str) -> Schedule:
    devices, loses_process = LAYOUTS[layout]
    faults = []
    processes = int(devices[-1])
    number = generator.randint(1, 3)
    for start in range(1, number + 1):
        kind = generator.choice(KINDS)
        # A start may stand behind the step already; then nothing happens in it, and the training ends.
        step = generator.randint(2, STEPS - 1)
        faults.append(
            (start, generator.randrange(processes), step - step % SAVE_STEPS if kind == "disk" else step, kind)
        )
    if loses_process:
        # The second process dies at some step, and again before it has begun.
        faults = [(1, 1, generator.randint(1, STEPS - 1), "kill"), (2, 1, 0, "kill")]
    return Schedule(devices, faults, loses_process, ("--restarts", "6", "--hang-timeout", str(HANG_TIMEOUT)))


def outcome_of(schedule: Schedule, folder: Path, expected: dict[str, torch.Tensor]) -> str:
    """What a schedule ends with."""
    done = schedule.run(folder)
    if done.returncode != 0:
        return f"ended with status {done.returncode}: {done.stderr[-2000:]}"
    if not are_close(final_weights(folder), expected, 1e-5 if schedule.loses_process else 0.0):
        return "other weights"
    if rows_of_epochs(folder) != [list(range(ROWS))] * (STEPS * GLOBAL_BATCH_SIZE // ROWS):
        return "rows lost or doubled"
    return "exact"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=50, help="how many (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="which faults at which moments (default: 0)")
    options = parser.parse_args()
    generator = random.Random(options.seed)
    expected: dict[str, Any] = {}
    counts: collections.Counter[str] = collections.Counter()
    lost, starts, began = 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        for number in range(options.schedules):
            layout = [*LAYOUTS][number % len(LAYOUTS)]
            schedule = random_schedule(generator, layout)
            if layout not in expected:
                expected[layout] = undisturbed(schedule, Path(root) / f"whole {layout}")
            folder = Path(root) / str(number)
            outcome = outcome_of(schedule, folder, expected[layout])
            counts[outcome.partition(":")[0]] += 1
            lost = max(lost, most_lost(folder))
            starts += len({start for start, _, _ in steps_of(folder)})
            if outcome != "exact":
                print(f"{layout}, {schedule.faults}: {outcome}", flush=True)
    print(
        f"{options.schedules} schedules, {starts} starts, {time.monotonic() - began:.0f} s: {dict(counts)}; at most "
        f"{lost} optimizer steps lost at a fault, with a checkpoint every {SAVE_STEPS}"
    )
    if counts["exact"] < options.schedules or lost > SAVE_STEPS:
        sys.exit("not all ended with the weights of an undisturbed run, or more than one save interval was lost")


if __name__ == "__main__":
    main()
