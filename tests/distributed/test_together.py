"""Processes of a test are waited for together, and what a failing one has said is shown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import together
from tests.distributed.together import wait_for_all
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS, wait_until

FAILS = "import sys; print('sample 17 is damaged'); sys.exit(3)"
HANGS = "import time; print('waiting for the other', flush=True); time.sleep(300)"


def started(folder: Path, *programs: str) -> tuple[list[subprocess.Popen[bytes]], list[Path]]:
    processes, logs = [], []
    for rank, program in enumerate(programs):
        logs.append(folder / f"log{rank}")
        with logs[-1].open("w") as log:
            processes.append(subprocess.Popen([sys.executable, "-c", program], stdout=log))
    return processes, logs


def test_processes_that_end_well_are_waited_for(tmp_path: Path) -> None:
    processes, logs = started(tmp_path, "print(1)", "import time; time.sleep(0.5)")
    wait_for_all(processes, logs, LONGEST_WAIT_SECONDS)
    assert [process.returncode for process in processes] == [0, 0]


def test_a_failure_ends_the_processes_that_wait_for_it_and_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "SECONDS_AFTER_A_FAILURE", 0.5)
    processes, logs = started(tmp_path, HANGS, FAILS)
    # One that was waited for to its end would have status 0.
    with pytest.raises(AssertionError, match=r"(?s)Statuses \[None, 3\].*log0.*log1:\nsample 17 is damaged"):
        wait_for_all(processes, logs, LONGEST_WAIT_SECONDS)
    assert all(process.returncode is not None for process in processes)


def test_a_process_that_does_not_end_in_time_is_shown_too(tmp_path: Path) -> None:
    processes, logs = started(tmp_path, HANGS)
    wait_until(lambda: processes[0].poll() is not None or bool(logs[0].read_text()), "the process runs")
    with pytest.raises(AssertionError, match=r"(?s)Statuses \[None\].*limit 0\.5 s.*waiting for the other"):
        wait_for_all(processes, logs, 0.5)
