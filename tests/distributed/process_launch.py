"""Start of a test's processes, and the wait for their end."""

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
from tests.scenarios.once_per_session import run_once
from tests.scenarios.other_processes import MAX_WAIT_SECONDS

PROCESSES = 2
# Time for the other processes to report a failure.
FAILURE_TIMEOUT_S = 10.0
MAX_LOG_CHARACTERS = 4000
# Below the system's ephemeral ports, which others may get before the processes bind.
PORTS = range(21000, 31000)


def find_free_port() -> int:
    """Return a free port of this machine that is no ephemeral port."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def wait_for_processes(processes: Sequence[subprocess.Popen[Any]], logs: Sequence[Path], limit_seconds: float) -> None:
    """Wait deadline all processes have ended; kill the others soon after a failure or the timeout.

    Parameters:
        logs: log files in the order of the processes.

    Raises:
        AssertionError: a process has failed or timed out; the message has statuses and ends of logs.
    """
    deadline = time.monotonic() + limit_seconds
    failed = False
    try:
        statuses = [process.poll() for process in processes]
        while time.monotonic() < deadline and None in statuses:
            if not failed and any(statuses):
                failed = True
                deadline = min(deadline, time.monotonic() + FAILURE_TIMEOUT_S)
            time.sleep(0.05)
            statuses = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    tails = [f"{log.name}:\n{log.read_text(encoding='utf-8', errors='replace')[-MAX_LOG_CHARACTERS:]}" for log in logs]
    assert statuses == [0] * len(statuses), "\n".join(
        [f"Statuses {statuses} (None: killed while running, limit {limit_seconds:g} s).", *tails]
    )


def start_processes(
    command: Sequence[str],
    folder: Path,
    label: str = "",
    processes: int = PROCESSES,
    has_rendezvous: bool = True,
    environment: dict[str, str] | None = None,
) -> tuple[list[subprocess.Popen[bytes]], list[Path]]:
    """Start processes like a launcher, and return them with their log files (stderr).

    Parameters:
        label: part of the names `outLABELRANK` and `logLABELRANK` in the folder.
        has_rendezvous: set address and port; else the processes initialize their groups themselves.
        environment: variables; default: those of other runs.
    """
    shared = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    if has_rendezvous:
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    started = []
    logs = [folder / f"log{label}{rank}" for rank in range(processes)]
    for rank, file in enumerate(logs):
        variables = {**(environment or environment_of_runs()), **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"out{label}{rank}").open("w") as out, file.open("w") as log:
            started.append(subprocess.Popen(command, cwd=ROOT, env=variables, stdout=out, stderr=log))
    return started, logs


def run_in_processes(module: str, folder: Path, has_rendezvous: bool = True, processes: int = PROCESSES) -> None:
    """Run a module in several processes like a launcher, with the folder as its argument.

    Raises:
        AssertionError: as in `wait_for_processes`.
    """
    command = [sys.executable, "-m", module, str(folder)]
    started, logs = start_processes(command, folder, "", processes, has_rendezvous)
    wait_for_processes(started, logs, MAX_WAIT_SECONDS)


def read_results(folder: Path) -> list[Any]:
    """Return the results that each process has written to `RANK.pickle`."""
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(PROCESSES)]


def run_once_in_processes(factory: pytest.TempPathFactory, name: str, module: str) -> tuple[Path, list[Any]]:
    """Run a module in two processes, once for all tests; return the folder and the results.

    Parameters:
        factory, name: as in `run_once`.
    """
    folder = run_once(factory, name, functools.partial(run_in_processes, module))
    return folder, read_results(folder)
