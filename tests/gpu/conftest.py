"""Starts trainings on GPUs, each in separate processes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.process_launch import find_free_port, wait_for_processes
from tests.fidelity.conftest import ROOT, environment_of_runs
from tests.gpu import trainings
from tests.scenarios.other_processes import MAX_WAIT_SECONDS


def needs_gpus(number: int) -> pytest.MarkDecorator:
    """Skips a test where there are fewer GPUs."""
    there = torch.cuda.device_count()
    return pytest.mark.skipif(there < number, reason=f"needs {number} GPU{'s' * (number > 1)}, and there are {there}")


def run_training(side: str, name: str, folder: Path, processes: int = 1, **environment: str) -> list[Any]:
    """Run a training of `trainings.TRAININGS` in separate processes, and return their results."""
    folder.mkdir(parents=True)
    visible = {**environment_of_runs(), "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(processes))), **environment}
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    launched |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    started = []
    logs = [folder / f"log{rank}" for rank in range(processes)]
    for rank in range(processes):
        ranks = {**launched, "RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
        with logs[rank].open("w") as log:
            command = [sys.executable, "-m", trainings.__name__, side, name, str(folder)]
            started.append(
                subprocess.Popen(command, cwd=ROOT, env={**visible, **ranks}, stdout=log, stderr=subprocess.STDOUT)
            )
    wait_for_processes(started, logs, MAX_WAIT_SECONDS)
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(processes)]


@pytest.fixture
def both(tmp_path: Path) -> Callable[[str], tuple[Any, Any]]:
    """The results of a training on a GPU, with our Trainer and with transformers'."""

    def run(name: str) -> tuple[Any, Any]:
        return tuple(run_training(side, name, tmp_path / side)[0] for side in ("ours", "theirs"))

    return run
