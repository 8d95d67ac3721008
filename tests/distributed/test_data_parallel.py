"""Training steps in two processes, with the checks in `training_process`, and their output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed import training_process
from tests.distributed.checks import assert_passed, run_checks_in_processes
from tests.distributed.process_launch import PROCESSES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the outcomes and outputs of the checks."""
    return run_checks_in_processes(tmp_path_factory, training_process.__name__)


@pytest.mark.parametrize("check", [check.__name__ for check in training_process.CHECKS])
def test_training_in_two_processes(folder: Path, check: str) -> None:
    assert_passed(folder, check)


def test_a_step_makes_as_many_python_calls_as_in_a_single_process_except_for_exchanges(
    folder: Path, tmp_path: Path
) -> None:
    check = training_process.a_step_makes_few_python_calls
    single = training_process.list_calls_of_a_step(tmp_path)
    for rank in range(PROCESSES):
        calls = json.loads((folder / check.__name__ / f"calls{rank}.json").read_text())
        # Flags are synchronized, and batches sharded.
        exchanges = [file for file in calls if file.startswith("distributed/") or file == "data/sharding.py"]
        assert 0 < len(exchanges) <= 17 and len(calls) - len(exchanges) <= len(single)


def test_only_the_first_process_prints_and_the_process_that_raises_a_flag_logs_a_warning(folder: Path) -> None:
    first, second = ((folder / f"out{rank}").read_text() for rank in range(PROCESSES))
    assert "train_runtime" in first and second == ""
    for rank in range(PROCESSES):
        log = (folder / f"log{rank}").read_text()
        for chatter in ("Initializing distributed", "distributed_backend", "GLOBAL_RANK", "LOCAL_RANK", "Trainer.fit"):
            assert chatter not in log, log
        assert ("control.should_training_stop was set in this process" in log) is (rank == 1)
