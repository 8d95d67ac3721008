"""Two processes of a test, started at once, waited for, and never left behind."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from filelock import FileLock

from tests.fidelity.conftest import ROOT, environment_of_runs

PROCESSES = 2
LONGEST_RUN_SECONDS = 300


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run_together(module: str, folder: Path) -> None:
    """Run a module in two processes as a launcher would, with the folder as its argument.

    Raises:
        AssertionError: one of them ended with an error; shows what all have written.
    """
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    sizes = {"WORLD_SIZE": str(PROCESSES), "LOCAL_WORLD_SIZE": str(PROCESSES)}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(PROCESSES):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (folder / f"log{rank}").open("w") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", module, str(folder)],
                        cwd=ROOT,
                        env={**environment_of_runs(), **meeting, **sizes, **ranks},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        ends = [process.wait(timeout=LONGEST_RUN_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    logs = "\n".join((folder / f"log{rank}").read_text() for rank in range(PROCESSES))
    assert ends == [0] * PROCESSES, logs


def found_together(module: str, folder: Path) -> list[Any]:
    """What two processes of a module have found, each of which writes it to `RANK.pickle`; they run once for all tests.

    Parameters:
        folder: shared by all workers of the test session.
    """
    files = [folder / f"{rank}.pickle" for rank in range(PROCESSES)]
    with FileLock(f"{folder}.lock"):
        if not files[-1].exists():
            folder.mkdir(parents=True)
            run_together(module, folder)
    return [pickle.loads(file.read_bytes()) for file in files]
