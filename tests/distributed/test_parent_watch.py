from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from littrainer.distributed import parent_watch
from tests.compat.processes import environment
from tests.scenarios.other_processes import wait_until

STARTER = """
import os, subprocess, sys

worker = subprocess.Popen([sys.executable, sys.argv[1]], env={**os.environ, "LITTRAINER_STARTED_BY": str(os.getpid())})
print(worker.pid, flush=True)
worker.wait()
"""
WORKER = """
import pathlib, time

from littrainer.distributed.parent_watch import end_with_starter

end_with_starter()
pathlib.Path(__file__).with_suffix(".ready").touch()
time.sleep(600)
"""


def is_running(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    # Whoever inherits it may not have asked for its end yet.
    stat = Path(f"/proc/{number}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(os.name != "posix", reason="only POSIX tells of a parent's end")
def test_a_process_ends_with_the_one_that_has_started_it_however_that_ends(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, str(worker)], env=environment(), stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        number = int(starter.stdout.readline())
        wait_until(worker.with_suffix(".ready").exists, "the worker watches its parent")
        starter.kill()
    wait_until(lambda: not is_running(number), "the worker has ended")


@pytest.mark.parametrize(("outside", "seconds"), [("", 600), ("7", 7)])
def test_a_process_has_time_to_save_a_checkpoint_before_it_ends_by_force(
    monkeypatch: pytest.MonkeyPatch, outside: str, seconds: int
) -> None:
    monkeypatch.setenv(parent_watch.GRACE, outside)
    happened: list[Any] = []
    monkeypatch.setattr(os, "getppid", lambda: 1)
    monkeypatch.setattr(os, "kill", lambda number, sent: happened.append(sent))
    monkeypatch.setattr(os, "_exit", happened.append)
    monkeypatch.setattr(time, "sleep", happened.append)
    parent_watch._watch(os.getpid(), parent_watch.grace_seconds())
    assert happened == [signal.SIGTERM, seconds, 1]
