"""The command line of `numbers` and `memory`: trainings with a random fault each, in one process and then in two."""

from __future__ import annotations

import argparse
import collections
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from tests.distributed.process_launch import start_processes, wait_for_processes

PROCESSES, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
Outcomes = Callable[[int, int, Path], tuple[collections.Counter[str], str]]


def run_faults(module: str, outcomes: Outcomes, faults: int, well: str) -> int:
    """Run trainings in this process and in two processes; return the exit status.

    Parameters:
        module: the module of `outcomes`.
        outcomes: takes a number of trainings, a seed and a folder; returns counts of outcomes, and a remark.
        faults: the default number of trainings.
        well: the right outcome.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=faults)
    parser.add_argument("--in-two-processes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as other:
        folder = options.folder or Path(other)
        counts, remark = outcomes(options.faults, options.seed, folder)
        if RANK == 0:
            print(f"in {PROCESSES} process{'es' if PROCESSES > 1 else ''}: {dict(counts)}{remark}", flush=True)
        if PROCESSES == 1 and options.in_two_processes:
            settings = {"faults": options.in_two_processes, "seed": options.seed, "folder": folder / "together"}
            arguments = [f"--{name}={value}" for name, value in settings.items()]
            started, logs = start_processes([sys.executable, "-m", module, *arguments], folder)
            try:
                wait_for_processes(started, logs, 120 + 20 * options.in_two_processes)
            finally:
                print((folder / "out0").read_text(), end="")
    return int(set(counts) != {well})
