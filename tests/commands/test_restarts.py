"""What `littrainer run --restarts` starts after a failure, without any process."""

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
    """The folder of the run, in a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(TRAININGS, str(tmp_path / "trainings.json"))
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def devices(restarts: Restarts, *failures: Failure) -> list[int | None]:
    """The processes started after each of these failures; None for an end."""
    answers: list[Any] = [restarts(failure) for failure in failures]
    return [None if launch is None else launch.devices for launch in answers]


def test_it_starts_as_often_as_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    restarts = Restarts(Launch(2, restarts=2))
    assert devices(restarts, KILLED, failed("ValueError: a", 3), KILLED) == [2, 2, None]
    told = capsys.readouterr().err
    assert "restart 1 of 2, in 2 processes, from the newest checkpoint" in told
    assert told.endswith("all 2 restarts are used up\n")


@pytest.mark.parametrize(
    ("second", "goes_on"),
    [
        (failed("ValueError: row 7", 5), False),
        (failed("ValueError: row 7", 6), True),
        (failed("ValueError: row 8", 5), True),
        (KILLED, True),
    ],
)
def test_an_error_that_came_before_at_the_same_step_ends_the_run(
    capsys: pytest.CaptureFixture[str], second: Failure, goes_on: bool
) -> None:
    restarts = Restarts(Launch(1, restarts=9))
    # What happened in between changes nothing.
    assert devices(restarts, failed("ValueError: row 7", 5), KILLED, second) == [1, 1, 1 if goes_on else None]
    assert ("would come again: nothing is started again" in capsys.readouterr().err) is not goes_on


def test_ends_without_a_reported_error_are_not_taken_for_the_same_error() -> None:
    unknown = failed("", None)
    assert devices(Restarts(Launch(1, restarts=2)), unknown, unknown, unknown) == [1, 1, None]


def test_a_process_that_dies_again_without_a_checkpoint_is_done_without(run_dir: Path) -> None:
    restarts = Restarts(Launch(8, min_devices=2, restarts=9))
    Path(os.environ[TRAININGS]).write_text(json.dumps({"0": {str(run_dir): {}}}))
    assert devices(restarts, KILLED) == [8]
    (run_dir / "checkpoint-2").mkdir()
    # Work was done since; then 8 are halved as long as at least 2 are left. An error is no reason.
    assert devices(restarts, KILLED, failed("ValueError: a", 1), KILLED) == [8, 8, 8]
    assert devices(restarts, KILLED, KILLED, KILLED) == [4, 2, 2]
    restarts = Restarts(Launch(2, restarts=9))
    assert devices(restarts, KILLED, KILLED, KILLED) == [2, 2, 2]


def test_a_process_that_raises_again_as_without_its_device_is_done_without(run_dir: Path) -> None:
    lost = failed("RuntimeError: invalid device ordinal", None, rank=1)
    assert devices(Restarts(Launch(2, min_devices=1, restarts=5)), lost, lost, lost) == [2, 1, None]
    # Of another process it is the same error, and no device.
    other = failed("RuntimeError: invalid device ordinal", None, rank=0)
    assert devices(Restarts(Launch(2, min_devices=1, restarts=5)), lost, other) == [2, None]


def test_where_the_processes_stood_is_kept_in_the_folder_of_the_run(
    tmp_path: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    restarts = Restarts(Launch(1, hang_seconds=9.0))
    assert devices(restarts, failed("ValueError: a", 1)) == [None]
    Path(os.environ[TRAININGS]).write_text(json.dumps({"0": {str(run_dir): {}}}))
    assert devices(restarts, failed("ValueError: b", 1)) == [None]
    # Before its training began there was no such folder.
    assert "ValueError: a" in (tmp_path / STACKS_NAME).read_text()
    kept = (run_dir / STACKS_NAME).read_text()
    assert "process 0 ended: ValueError: b ====\n---- process 0 ----\nin forward\n" in kept
    assert f"where all processes stood is in {run_dir / STACKS_NAME}" in capsys.readouterr().err
    # One that is killed leaves nothing.
    assert devices(Restarts(Launch(1, hang_seconds=9.0)), KILLED) == [None]
    assert devices(Restarts(Launch(2)), KILLED) == [None]
    assert capsys.readouterr().err == ""
