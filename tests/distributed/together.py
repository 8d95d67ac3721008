"""Two processes of a test, started at once, waited for, and never left behind."""

from __future__ import annotations

import functools
import pickle
import random
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fidelity.conftest import ROOT, environment_of_runs
from tests.scenarios.once_per_session import carried_out_once
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS

PROCESSES = 2
# In which the others may still say what the end of one means to them.
SECONDS_AFTER_A_FAILURE = 10.0
SHOWN_CHARACTERS = 4000
# Below those that the system hands out, of which one that is free may be taken before the processes come to use it.
OWN_PORTS = range(21000, 31000)


def find_free_port() -> int:
    """A port of this machine that nobody uses, nor gets by chance while the processes start."""
    while True:
        port = random.SystemRandom().choice(OWN_PORTS)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def wait_for_processes(processes: Sequence[subprocess.Popen[Any]], logs: Sequence[Path], limit_seconds: float) -> None:
    """Wait until all processes have ended; when one fails, or time is up, the others are killed soon after.

    Parameters:
        logs: what each process writes to, in the order of the processes.

    Raises:
        AssertionError: a process has failed, or not ended in time; shows the statuses and the ends of all logs.
    """
    until = time.monotonic() + limit_seconds
    failed = False
    try:
        statuses = [process.poll() for process in processes]
        while time.monotonic() < until and None in statuses:
            if not failed and any(statuses):
                failed = True
                until = min(until, time.monotonic() + SECONDS_AFTER_A_FAILURE)
            time.sleep(0.05)
            statuses = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    tails = [f"{log.name}:\n{log.read_text(encoding='utf-8', errors='replace')[-SHOWN_CHARACTERS:]}" for log in logs]
    assert statuses == [0] * len(statuses), "\n".join(
        [f"Statuses {statuses} (None: killed while it went on, limit {limit_seconds:g} s).", *tails]
    )


def start_processes(
    command: Sequence[str],
    folder: Path,
    label: str = "",
    processes: int = PROCESSES,
    are_told_where_to_meet: bool = True,
    environment: dict[str, str] | None = None,
) -> tuple[list[subprocess.Popen[bytes]], list[Path]]:
    """Start processes as a launcher would, and return them with the files of what they write on stderr.

    Parameters:
        label: each writes to `outLABELRANK` and `logLABELRANK` in the folder.
        are_told_where_to_meet: as by launchers; else they bring their process groups up by themselves.
        environment: by default that of other runs.
    """
    shared = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    if are_told_where_to_meet:
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    started = []
    logs = [folder / f"log{label}{rank}" for rank in range(processes)]
    for rank, file in enumerate(logs):
        own = {**(environment or environment_of_runs()), **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"out{label}{rank}").open("w") as out, file.open("w") as log:
            started.append(subprocess.Popen(command, cwd=ROOT, env=own, stdout=out, stderr=log))
    return started, logs


def run_in_processes(
    module: str, folder: Path, are_told_where_to_meet: bool = True, processes: int = PROCESSES
) -> None:
    """Run a module in two processes or more as a launcher would, with the folder as its argument.

    Raises:
        AssertionError: as `wait_for_processes`.
    """
    command = [sys.executable, "-m", module, str(folder)]
    started, logs = start_processes(command, folder, "", processes, are_told_where_to_meet)
    wait_for_processes(started, logs, LONGEST_WAIT_SECONDS)


def read_results(folder: Path) -> list[Any]:
    """What each process has found and written to `RANK.pickle`."""
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(PROCESSES)]


def run_once_in_processes(factory: pytest.TempPathFactory, name: str, module: str) -> tuple[Path, list[Any]]:
    """The folder in which two processes of a module have run once for all tests, and what each of them found.

    Parameters:
        factory, name: as for `carried_out_once`.
    """
    folder = carried_out_once(factory, name, functools.partial(run_in_processes, module))
    return folder, read_results(folder)
