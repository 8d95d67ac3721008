"""Comparison with transformers' Trainer under DeepSpeed, on two CPU processes: numbers and files are equal.

It needs DeepSpeed, a C++ compiler and ninja. The environment variable DEEPSPEED_VARIANTS selects variants; all of them
take some minutes.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deepspeed.variants import VARIANTS
from tests.distributed.process_launch import start_processes, wait_for_processes
from tests.fidelity.conftest import environment_of_runs
from tests.scenarios.once_per_session import run_once


def _is_installed() -> bool:
    try:
        importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _is_installed(), reason="DeepSpeed is not installed")
MAX_RUN_S = 1200
CHOSEN = os.environ.get("DEEPSPEED_VARIANTS", "").split() or list(VARIANTS)
RESUMED = [name for name in CHOSEN if VARIANTS[name].get("resumes")]
# transformers has no engine for the training after an evaluation.
WITHOUT_REFERENCE = {"evaluated_first": "stage_3"}


def run_in_two_processes(side: str, folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "tests.deepspeed.variants", side, str(folder), *names]
    environment = {**environment_of_runs(), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    processes, logs = start_processes(command, folder, environment=environment)
    wait_for_processes(processes, logs, MAX_RUN_S)


def run_both_sides(folder: Path) -> None:
    for side in ("transformers", "littrainer"):
        run_in_two_processes(side, folder / side, CHOSEN)
    for side, other in (("transformers", "littrainer"), ("littrainer", "transformers")):
        crossed = [f"{name}={folder / other / name / 'checkpoint-3'}" for name in RESUMED]
        if crossed:
            run_in_two_processes(side, folder / f"{side}-crossed", crossed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return records of both sides, and of each side resuming the other's checkpoints."""
    return run_once(tmp_path_factory, "deepspeed", run_both_sides)


def record(folder: Path, name: str, rank: int) -> dict[str, Any]:
    values = json.loads((folder / f"{name}_{rank}.json").read_text())
    assert "error" not in values, values["error"]
    for entry in values["history"]:
        # transformers counts the parameters that happen to be gathered.
        entry.pop("total_flos", None)
    return values


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", CHOSEN)
def test_a_training_is_the_same_as_with_transformers(folder: Path, name: str, rank: int) -> None:
    ours = record(folder / "littrainer", name, rank)
    theirs = record(folder / "transformers", WITHOUT_REFERENCE.get(name, name), rank)
    if name in WITHOUT_REFERENCE:
        del ours["before"], ours["files"], theirs["files"]
    assert ours == theirs


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("side", ["transformers", "littrainer"])
@pytest.mark.parametrize("name", RESUMED)
def test_checkpoints_are_exchanged_with_transformers(folder: Path, name: str, side: str, rank: int) -> None:
    continued, crossed = record(folder / side, name, rank), record(folder / f"{side}-crossed", name, rank)
    del continued["files"], crossed["files"]
    assert crossed == continued
