"""What a training step does in two processes, as `training_process` tries it, and what they print."""

from __future__ import annotations

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


def test_only_the_first_process_prints_and_the_one_that_raises_a_flag_alone_is_warned(folder: Path) -> None:
    first, second = ((folder / f"out{rank}").read_text() for rank in range(PROCESSES))
    assert "train_runtime" in first and second == ""
    for rank in range(PROCESSES):
        log = (folder / f"log{rank}").read_text()
        for chatter in ("Initializing distributed", "distributed_backend", "GLOBAL_RANK", "LOCAL_RANK", "Trainer.fit"):
            assert chatter not in log, log
        assert ("control.should_training_stop was set in this process" in log) is (rank == 1)
