"""Decisions of `littrainer run --restarts` after a failure, tested without processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from littrainer.checkpoint.layout import STACKS_NAME
from littrainer.commands.restarts import Restarts
from littrainer.distributed.environment import TRAININGS
from littrainer.distributed.launcher import Failure, Launch

KILLED = Failure("process 1 was ended by SIGKILL", 137, rank=1, was_killed=True)


def failed(error: str, step: int | None, rank: int = 0) -> Failure:
    stacks = f"---- process {rank} ----\nin forward\n"
    return Failure(f"process {rank} ended: {error}", 1, rank, error=error, step=step, stacks=stacks)


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the folder of the run, in a temporary working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(TRAININGS, str(tmp_path / "trainings.json"))
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def devices(restarts: Restarts, *failures: Failure) -> list[int | None]:
    """Return the number of processes started after each failure; None for no restart."""
    launches: list[Any] = [restarts(failure) for failure in failures]
    return [None if launch is None else launch.devices for launch in launches]


def test_processes_are_restarted_as_often_as_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    restarts = Restarts(Launch(2, restarts=2))
    assert devices(restarts, KILLED, failed("ValueError: a", 3), KILLED) == [2, 2, None]
    printed = capsys.readouterr().err
    assert "restart 1 of 2, in 2 processes, from the newest checkpoint" in printed
    assert printed.endswith("all 2 restarts are used up\n")


@pytest.mark.parametrize(
    ("second", "continues"),
    [
        (failed("ValueError: row 7", 5), False),
        (failed("ValueError: row 7", 6), True),
        (failed("ValueError: row 8", 5), True),
        (KILLED, True),
    ],
)
def test_an_error_repeated_at_the_same_step_ends_the_run(
    capsys: pytest.CaptureFixture[str], second: Failure, continues: bool
) -> None:
    restarts = Restarts(Launch(1, restarts=9))
    # Failures in between do not matter.
    assert devices(restarts, failed("ValueError: row 7", 5), KILLED, second) == [1, 1, 1 if continues else None]
    assert ("would come again: nothing is started again" in capsys.readouterr().err) is not continues


def test_failures_without_a_reported_error_are_no_repetition() -> None:
    unknown = failed("", None)
    assert devices(Restarts(Launch(1, restarts=2)), unknown, unknown, unknown) == [1, 1, None]


def test_fewer_processes_continue_after_two_kills_without_a_checkpoint(run_dir: Path) -> None:
    restarts = Restarts(Launch(8, min_devices=2, restarts=9))
    Path(os.environ[TRAININGS]).write_text(json.dumps({"0": {str(run_dir): {}}}))
    assert devices(restarts, KILLED) == [8]
    (run_dir / "checkpoint-2").mkdir()
    # There is a new checkpoint; then 8 processes are halved down to 2. An exception is no reason.
    assert devices(restarts, KILLED, failed("ValueError: a", 1), KILLED) == [8, 8, 8]
    assert devices(restarts, KILLED, KILLED, KILLED) == [4, 2, 2]
    restarts = Restarts(Launch(2, restarts=9))
    assert devices(restarts, KILLED, KILLED, KILLED) == [2, 2, 2]


def test_fewer_processes_continue_after_two_exceptions_of_a_process(run_dir: Path) -> None:
    lost = failed("RuntimeError: invalid device ordinal", None, rank=1)
    assert devices(Restarts(Launch(2, min_devices=1, restarts=5)), lost, lost, lost) == [2, 1, None]
    # The same error in another process is no broken device.
    other = failed("RuntimeError: invalid device ordinal", None, rank=0)
    assert devices(Restarts(Launch(2, min_devices=1, restarts=5)), lost, other) == [2, None]


def test_stack_traces_are_saved_in_the_folder_of_the_run(
    tmp_path: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    restarts = Restarts(Launch(1, hang_seconds=9.0))
    assert devices(restarts, failed("ValueError: a", 1)) == [None]
    Path(os.environ[TRAININGS]).write_text(json.dumps({"0": {str(run_dir): {}}}))
    assert devices(restarts, failed("ValueError: b", 1)) == [None]
    # The first failure was before the training, without a run folder.
    assert "ValueError: a" in (tmp_path / STACKS_NAME).read_text()
    saved = (run_dir / STACKS_NAME).read_text()
    assert "process 0 ended: ValueError: b ====\n---- process 0 ----\nin forward\n" in saved
    assert f"stack traces of all processes are in {run_dir / STACKS_NAME}" in capsys.readouterr().err
    # Killed processes have no stack traces.
    assert devices(Restarts(Launch(1, hang_seconds=9.0)), KILLED) == [None]
    assert devices(Restarts(Launch(2)), KILLED) == [None]
    assert capsys.readouterr().err == ""
