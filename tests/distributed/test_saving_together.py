"""Checkpoints of two processes: writing, selecting, resuming, and failures of a process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from littrainer.checkpoint.verification import find_damage
from tests.distributed import saving_process
from tests.distributed.checks import assert_passed, run_checks_in_processes
from tests.distributed.saving_process import CHECKPOINTS, MAX_WAIT, make


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the two processes that run the checks."""
    return run_checks_in_processes(tmp_path_factory, saving_process.__name__, has_rendezvous=False)


@pytest.mark.parametrize("check", [check.__name__ for check in saving_process.CHECKS])
def test_saving_in_two_processes(folder: Path, check: str) -> None:
    assert_passed(folder, check)


@pytest.mark.parametrize("victim", [0, 1])
def test_killing_a_process_that_saves_ends_the_other_and_the_next_run_cleans_up(folder: Path, victim: int) -> None:
    assert not (folder / f"killed{victim}" / f"{victim}.json").exists()
    survivor = json.loads((folder / f"killed{victim}" / f"{1 - victim}.json").read_text())
    assert f"process {victim} has ended" in survivor["error"]
    assert survivor["seconds"] < MAX_WAIT.total_seconds() / 2
    run = folder / f"killed{victim}" / "run"
    assert find_damage(run / "checkpoint-2") == [] and not (run / "checkpoint-4").exists()
    trainer = make(run)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 6
    assert sorted(path.name for path in run.iterdir()) == [*CHECKPOINTS, "littrainer_run.json"]


def test_killing_a_process_that_writes_shards_ends_the_other_and_the_next_run_cleans_up(
    folder: Path,
) -> None:
    survivor = json.loads((folder / "killed-with-shards" / "0.json").read_text())
    assert "process 1 has ended" in survivor["error"] and survivor["seconds"] < MAX_WAIT.total_seconds() / 2
    run = folder / "killed-with-shards" / "run"
    assert find_damage(run / "checkpoint-2") == [] and not (run / "checkpoint-4").exists()
    make(run).train(resume_from_checkpoint=True)
    assert sorted(path.name for path in run.iterdir()) == [*CHECKPOINTS, "littrainer_run.json"]
