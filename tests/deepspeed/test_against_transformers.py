"""DeepSpeed itself, on two CPU processes: our Trainer does what transformers' does, number for number, file for file.

Only where DeepSpeed is installed, with what it builds its CPU operations by (a C++ compiler and ninja). Environment
variable DEEPSPEED_VARIANTS names some of the variants; by default all are run, which takes some minutes.
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
from tests.distributed.together import start_processes, wait_for_processes
from tests.fidelity.conftest import environment_of_runs
from tests.scenarios.once_per_session import carried_out_once


def _is_installed() -> bool:
    try:
        importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _is_installed(), reason="DeepSpeed is not installed")
LONGEST_RUN_SECONDS = 1200
CHOSEN = os.environ.get("DEEPSPEED_VARIANTS", "").split() or list(VARIANTS)
RESUMED = [name for name in CHOSEN if VARIANTS[name].get("resumes")]
# transformers has no engine for the training after an evaluation.
WITHOUT_REFERENCE = {"evaluated_first": "stage_3"}


def run_two(side: str, folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "tests.deepspeed.variants", side, str(folder), *names]
    environment = {**environment_of_runs(), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    processes, logs = start_processes(command, folder, environment=environment)
    wait_for_processes(processes, logs, LONGEST_RUN_SECONDS)


def run_both_sides(folder: Path) -> None:
    for side in ("transformers", "littrainer"):
        run_two(side, folder / side, CHOSEN)
    for side, other in (("transformers", "littrainer"), ("littrainer", "transformers")):
        crossed = [f"{name}={folder / other / name / 'checkpoint-3'}" for name in RESUMED]
        if crossed:
            run_two(side, folder / f"{side}-crossed", crossed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of both sides, and of each side going on from the other's checkpoints."""
    return carried_out_once(tmp_path_factory, "deepspeed", run_both_sides)


def record(folder: Path, name: str, rank: int) -> dict[str, Any]:
    found = json.loads((folder / f"{name}_{rank}.json").read_text())
    assert "error" not in found, found["error"]
    for entry in found["history"]:
        # transformers counts those parameters that happen to be gathered in the process.
        entry.pop("total_flos", None)
    return found


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", CHOSEN)
def test_a_training_is_the_same_as_with_transformers(folder: Path, name: str, rank: int) -> None:
    ours = record(folder / "littrainer", name, rank)
    theirs = record(folder / "transformers", WITHOUT_REFERENCE.get(name, name), rank)
    if name in WITHOUT_REFERENCE:
        for own in ("before", "files"):
            ours.pop(own)
        theirs.pop("files")
    assert ours == theirs


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("side", ["transformers", "littrainer"])
@pytest.mark.parametrize("name", RESUMED)
def test_checkpoints_are_exchanged_with_transformers(folder: Path, name: str, side: str, rank: int) -> None:
    own, crossed = record(folder / side, name, rank), record(folder / f"{side}-crossed", name, rank)
    for found in (own, crossed):
        found.pop("files")
    assert crossed == own
