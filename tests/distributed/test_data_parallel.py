"""What a training step does in two processes, as `training_process` tries it, and what they print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed import training_process
from tests.distributed.checks import assert_well, endings_of
from tests.distributed.together import PROCESSES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes, started once for all tests, wrote how the checks ended and what they printed."""
    return endings_of(tmp_path_factory, training_process.__name__)


@pytest.mark.parametrize("check", [check.__name__ for check in training_process.CHECKS])
def test_two_processes_train_together(folder: Path, check: str) -> None:
    assert_well(folder, check)


def test_a_step_makes_as_many_python_calls_as_in_one_process_but_for_exchange_and_shares(
    folder: Path, tmp_path: Path
) -> None:
    check = training_process.python_calls_of_a_step_are_those_of_one_process_and_of_the_exchange
    alone = training_process.calls_of_a_step(tmp_path)
    for rank in range(PROCESSES):
        together = json.loads((folder / check.__name__ / f"calls{rank}.json").read_text())
        # Flags of the control are counted, and of each round of batches one is this process's.
        shared = [file for file in together if file.startswith("distributed/") or file == "data/sharding.py"]
        assert 0 < len(shared) <= 17 and len(together) - len(shared) <= len(alone)


def test_only_the_first_process_prints_and_the_one_that_raises_a_flag_alone_is_warned(folder: Path) -> None:
    first, second = ((folder / f"out{rank}").read_text() for rank in range(PROCESSES))
    assert "train_runtime" in first and second == ""
    for rank in range(PROCESSES):
        log = (folder / f"log{rank}").read_text()
        for chatter in ("Initializing distributed", "distributed_backend", "GLOBAL_RANK", "LOCAL_RANK", "Trainer.fit"):
            assert chatter not in log, log
        assert ("control.should_training_stop was set in this process" in log) is (rank == 1)
