"""Restarts after kills, stops, exceptions, full disks and interrupted uploads.

    python -m tests.faults.chaos                50 schedules
    python -m tests.faults.chaos --schedules 6 --at-once 2

Each schedule is a training of 12 optimizer steps under `littrainer run --restarts`, in one process, in two, or in two
and then one (`--devices 1:2`), with one to three faults at random steps. The final weights must equal those of an
undisturbed run: bit for bit, or within 1e-5 if a process is lost; and each row must be trained once in an epoch. A
fault may lose at most one save interval. Errors name the start, since a run ends if an error repeats at the same step.
Uploads are interrupted at a file:// URL.

Processes are forked from a process that has imported everything, for a fast start.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import itertools
import json
import logging
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from littrainer.checkpoint.verification import find_damage
from littrainer.cli import main as littrainer
from tests.distributed.starting import get_plain_environment
from tests.scenarios.other_processes import MAX_WAIT_SECONDS

SCRIPT = "tests.faults.faulty_run"
REPOSITORY = Path(__file__).parents[2]
ROWS, STEPS, SAVE_STEPS, GLOBAL_BATCH_SIZE = 24, 12, 3, 4
AFTER_SAVES = ("disk", "cut upload")
KINDS = ("kill", "stop", "raise", *AFTER_SAVES)
# Layout -> value of --devices, and whether a process is lost.
LAYOUTS = {"1 process": ("1", False), "2 processes": ("2", False), "2 -> 1": ("1:2", True)}
EXACT, CLOSE = "the same weights bit for bit", "the same weights within 1e-5 (2 -> 1)"
HANG_TIMEOUT = 3


@dataclass(frozen=True)
class Schedule:
    """A training and its faults.

    Parameters:
        devices: value of --devices.
        faults: start, rank, step and kind of each.
        loses_process: whether the number of processes changes, which excludes dropout.
        options: further options of `littrainer run`.
    """

    devices: str
    faults: list[tuple[int, int, int, str]]
    loses_process: bool = False
    options: tuple[str, ...] = ("--restarts", "6")

    def words(self, folder: Path) -> list[str]:
        """Return the command line after `littrainer`."""
        sizes = {"per_device_train_batch_size": 2, "global_batch_size": GLOBAL_BATCH_SIZE}
        plan = {
            "faults": self.faults,
            "output_dir": f"file://{folder}/remote" if self.is_remote else str(folder / "run"),
            "dropout": 0.0 if self.loses_process else 0.2,
            "arguments": {"max_steps": STEPS, "save_steps": SAVE_STEPS, "learning_rate": 0.01, **sizes},
        }
        return ["run", "--devices", self.devices, *self.options, "-m", SCRIPT, str(folder), json.dumps(plan)]

    @property
    def is_remote(self) -> bool:
        return any(kind == "cut upload" for *_, kind in self.faults)


class Forked:
    """A fork that replaces `subprocess.Popen` in torch's agent."""

    def __init__(self, args: tuple[str, ...], env: dict[str, str], **_: Any) -> None:
        command = [*args[args.index("-m") + 1 :]]
        self.process = multiprocessing.get_context("fork").Process(target=run_script, args=(command, env))
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(SCRIPT, timeout or 0)
        return self.process.exitcode


def run_script(command: list[str], environment: dict[str, str]) -> None:
    """Run the script with the signals, variables and arguments of a new interpreter."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.disable(logging.NOTSET)
    os.environ.update(environment)
    sys.argv = command
    try:
        runpy.run_module(SCRIPT, run_name="__main__", alter_sys=True)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def run_forked(schedule: Schedule, folder: Path) -> tuple[int, str]:
    """Run a schedule in a folder; return exit status and log."""
    folder.mkdir()
    log = folder / "log.txt"

    def start() -> None:
        for number in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.chdir(REPOSITORY)
        os.environ.clear()
        os.environ.update(get_plain_environment(XDG_CACHE_HOME=str(folder / "cache")))
        handler = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
        with mock.patch(f"{handler}.Popen", Forked):
            sys.exit(littrainer(schedule.words(folder)))

    agent = multiprocessing.get_context("fork").Process(target=start)
    agent.start()
    agent.join(MAX_WAIT_SECONDS)
    if agent.exitcode is None:
        agent.terminate()
        agent.join()
    return agent.exitcode or 0, log.read_text()


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "final.pt", weights_only=True)


def steps_of(folder: Path) -> list[tuple[int, int, list[int]]]:
    """Return start, optimizer step and rows of all trained steps."""
    return [
        tuple(json.loads(line)) for path in sorted(folder.glob("steps-*")) for line in path.read_text().splitlines()
    ]


def rows_of_epochs(folder: Path) -> list[list[int]]:
    """Return the rows of each epoch, from the last start of each step."""
    last_start: dict[int, int] = {}
    for start, step, _ in steps_of(folder):
        last_start[step] = max(start, last_start.get(step, 0))
    epochs: dict[int, list[int]] = collections.defaultdict(list)
    for start, step, rows in steps_of(folder):
        if last_start[step] == start:
            epochs[(step - 1) * GLOBAL_BATCH_SIZE // ROWS] += rows
    return [sorted(epochs[number]) for number in sorted(epochs)]


def max_lost_steps(folder: Path) -> int:
    """Return the most optimizer steps that were repeated after a fault."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for start, step, _ in steps_of(folder):
        first[start], last[start] = min(step, first.get(start, step)), max(step, last.get(start, step))
    starts = sorted(first)
    pairs = itertools.pairwise(starts)
    return max((last[start] + 1 - first[restart] for start, restart in pairs), default=0)


def random_schedule(generator: random.Random, layout: str, kind: str) -> Schedule:
    """Draw a schedule whose first fault has a kind, or in layout 2 -> 1 is a kill or an exception."""
    devices, loses_process = LAYOUTS[layout]
    options = ("--restarts", "6", "--hang-timeout", str(HANG_TIMEOUT))
    processes = int(devices[-1])
    if loses_process:
        # A second process fails before the next checkpoint, or before its first step.
        rank, step = generator.randrange(2), generator.randint(1, STEPS - 1)
        kind, checkpoint = generator.choice(["kill", "raise"]), newest_checkpoint(step)
        again = generator.choice([0, *range(checkpoint + 1, checkpoint + SAVE_STEPS + 1)][kind == "raise" :])
        other = generator.randrange(2) if kind == "kill" else rank
        return Schedule(devices, [(1, rank, step, kind), (2, other, again, kind)], True, options)
    faults, checkpoint = [], 0
    for start in range(1, generator.randint(1, 3) + 1):
        if checkpoint + SAVE_STEPS > STEPS - 1:
            break
        rank, step = generator.randrange(processes), generator.randint(checkpoint + 1, STEPS - 1)
        if kind in AFTER_SAVES:
            step = generator.randrange(checkpoint + SAVE_STEPS, STEPS, SAVE_STEPS)
        # Rank 0 uploads.
        faults.append((start, 0 if kind == "cut upload" else rank, step, kind))
        if kind == "cut upload":
            # The number of uploaded steps is unknown.
            break
        checkpoint, kind = newest_checkpoint(step), generator.choice(KINDS)
    return Schedule(devices, faults, False, options)


def newest_checkpoint(step: int) -> int:
    """Return the step of the newest checkpoint during a step."""
    return (step - 1) // SAVE_STEPS * SAVE_STEPS


def outcome_of(schedule: Schedule, folder: Path) -> str:
    """Run a schedule and return its failure, or ""; weights are not compared."""
    status, log = run_forked(schedule, folder)
    if status != 0:
        return f"ended with status {status}: {log[-2000:]}"
    if rows_of_epochs(folder) != [list(range(ROWS))] * (STEPS * GLOBAL_BATCH_SIZE // ROWS):
        return "rows lost or doubled"
    if schedule.is_remote and find_damage(folder / "remote" / f"checkpoint-{STEPS}"):
        return "the newest remote checkpoint is damaged"
    return "" if log.count("littrainer: restart ") >= len(schedule.faults) else f"a fault did not occur: {log}"


def compare_weights(folder: Path, undisturbed: Path, loses_process: bool) -> str:
    """Return the outcome of comparing final weights with those of an undisturbed run."""
    weights, expected = final_weights(folder), final_weights(undisturbed)
    tolerance = 1e-5 if loses_process else 0.0
    if not all(torch.allclose(weights[name], expected[name], rtol=0, atol=tolerance) for name in expected):
        return "other weights"
    return CLOSE if loses_process else EXACT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=50, help="how many (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="which faults at which moments (default: 0)")
    parser.add_argument("--at-once", type=int, default=1, help="how many run at the same time (default: 1)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in (
        "littrainer.commands.run",
        "littrainer.trainer",
        "safetensors.torch",
        "torch.distributed.launcher",
        "fsspec.implementations.local",
    ):
        importlib.import_module(name)
    importlib.import_module("littrainer.lightning_adapter.run_lightning").import_lightning()
    generator = random.Random(options.seed)
    layouts, kinds = itertools.cycle(LAYOUTS), itertools.cycle(KINDS)
    schedules = [
        (layout, random_schedule(generator, layout, kind))
        for layout, kind in itertools.islice(zip(layouts, kinds, strict=False), options.schedules)
    ]
    counts: collections.Counter[str] = collections.Counter()
    faults: collections.Counter[str] = collections.Counter()
    began, lost, starts = time.monotonic(), 0, 0
    with (
        tempfile.TemporaryDirectory() as root,
        ProcessPoolExecutor(options.at_once, multiprocessing.get_context("fork")) as pool,
    ):
        expected = {layout: Path(root) / f"undisturbed {layout}" for layout in {layout for layout, _ in schedules}}
        undisturbed = [Schedule(LAYOUTS[layout][0], [], LAYOUTS[layout][1]) for layout in expected]
        folders = [Path(root) / str(number) for number in range(len(schedules))]
        references = [pool.submit(outcome_of, *pair) for pair in zip(undisturbed, expected.values(), strict=True)]
        running = [
            pool.submit(outcome_of, schedule, folder) for (_, schedule), folder in zip(schedules, folders, strict=True)
        ]
        for reference in references:
            if failure := reference.result():
                sys.exit(f"An undisturbed run: {failure}")
        for (layout, schedule), folder, run in zip(schedules, folders, running, strict=True):
            outcome = run.result() or compare_weights(folder, expected[layout], schedule.loses_process)
            counts[outcome.partition(":")[0]] += 1
            faults.update(kind for *_, kind in schedule.faults)
            lost = max(lost, max_lost_steps(folder))
            starts += 1 + len(schedule.faults)
            if outcome not in (EXACT, CLOSE):
                print(f"{layout}, {schedule.faults}: {outcome}", flush=True)
    print(f"{options.schedules} schedules with {dict(faults)}, {starts} starts, {time.monotonic() - began:.0f} s")
    for outcome, number in counts.items():
        print(f"{number:4} ended with {outcome}")
    print(f"{lost:4} optimizer steps lost at a fault, at most; saves are {SAVE_STEPS} apart")
    if counts[EXACT] + counts[CLOSE] < options.schedules or lost > SAVE_STEPS:
        sys.exit("not all ended with the weights of an undisturbed run, or more than one save interval was lost")


if __name__ == "__main__":
    main()
