"""`littrainer run --restarts --hang-timeout` with processes that are killed, stop, raise or hang."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from littrainer.checkpoint.layout import STACKS_NAME
from littrainer.distributed.failures import is_running
from tests.distributed.starting import run
from tests.faults.chaos import REPOSITORY, Schedule

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are ended by signals of POSIX")

WITH_RESTARTS = ("--restarts", "2", "--hang-timeout", "4")


def run_in(folder: Path, schedule: Schedule) -> subprocess.CompletedProcess[str]:
    """Run a schedule in a folder, in fresh interpreters."""
    return run("-m", "littrainer", *schedule.words(folder), cwd=REPOSITORY)


def test_after_a_process_is_killed_the_training_resumes_its_newest_checkpoint(tmp_path: Path) -> None:
    done = run_in(tmp_path / "a", Schedule("2", [(1, 1, 5, "kill")]))
    assert done.returncode == 0, done.stderr
    assert "process 1 of 2 (local rank 1, pid" in done.stderr and "was ended by SIGKILL" in done.stderr
    assert f"resumes from the checkpoint {tmp_path / 'a' / 'run' / 'checkpoint-3'}" in done.stderr


def test_a_stopped_process_is_ended_and_restarted(tmp_path: Path) -> None:
    done = run_in(tmp_path / "a", Schedule("1", [(1, 0, 5, "stop")], options=WITH_RESTARTS))
    assert done.returncode == 0, done.stderr
    assert re.search(r"pid \d+ has not responded for 4 s \(--hang-timeout\) and was ended", done.stderr)
    # The process continued to write its stacks.
    assert "faulty_run.py" in (tmp_path / "a" / "run" / STACKS_NAME).read_text()


def test_an_error_that_repeats_at_the_same_step_ends_the_run(tmp_path: Path) -> None:
    faults = [(start, 0, 5, "raise the same") for start in (1, 2, 3)]
    done = run_in(tmp_path / "a", Schedule("1", faults))
    assert done.returncode == 1
    assert done.stderr.count("ended with status 1: ValueError: a fault that comes again\n") == 2
    assert done.stderr.endswith("would come again: nothing is started again\n")


FAILS_ONCE = """
import os, pathlib, signal, time

from littrainer import TrainingArguments

TrainingArguments("out", use_cpu=True)
child = pathlib.Path("child")
if not child.exists():
    parent = os.getpid()
    number = os.fork()
    if not number:
        # Like a loader process, it polls for its parent, and is stopped before.
        os.kill(os.getpid(), signal.SIGSTOP)
        while os.getppid() == parent:
            time.sleep(0.1)
        os._exit(0)
    os.waitpid(number, os.WUNTRACED)
    child.write_text(str(number))
    raise RuntimeError(f"cannot decode {os.fsdecode(bytes([99, 0xe9]))}.wav")
"""


def test_invalid_utf_8_in_an_error_and_a_stopped_child_do_not_prevent_a_restart(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILS_ONCE)
    done = run("-m", "littrainer", "run", "--devices", "1", "--restarts", "1", "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ended with status 1: RuntimeError: cannot decode c\\udce9.wav" in done.stderr
    pid, deadline = int((tmp_path / "child").read_text()), time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


def test_the_file_of_a_hang_has_the_stacks_of_all_processes(tmp_path: Path) -> None:
    done = run_in(tmp_path / "a", Schedule("2", [(1, 1, 5, "hang")], options=("--hang-timeout", "5")))
    assert done.returncode == 1
    first, second = (tmp_path / "a" / "run" / STACKS_NAME).read_text().split("---- process 1 ----")
    assert "in on_step_begin" in second and "Last micro-batch: number 5 of epoch 0, rows" in second
    assert "in backward" in first and "Last collective operation: gloo:all_reduce" in first
    assert "HangError: Training has not moved for 5 s (hang_timeout), at optimizer step 4 of 12" in done.stderr


LOADER = """
from littrainer import Trainer, TrainingArguments
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import QUIET_RUN


def unpicklable(samples):
    return {"x": lambda: samples}


def main():
    # The worker cannot send the batch, so the training waits.
    args = TrainingArguments("out", dataloader_num_workers=1, hang_timeout=2, **QUIET_RUN)
    Trainer(VectorClassifier(), args, train_dataset=Rows(vector_rows(8)), data_collator=unpicklable).train()


if __name__ == "__main__":
    main()
"""


def test_a_hanging_data_loader_ends_a_plain_script_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LOADER)
    start = f"import runpy, sys; sys.path.append({str(REPOSITORY)!r}); runpy.run_path('script.py', run_name='__main__')"
    done = run("-c", start, cwd=tmp_path)
    assert done.returncode == 1
    assert "HangError: Training has not moved for 2 s (hang_timeout), at optimizer step 0 of 6" in done.stderr
    stacks = (tmp_path / "out" / STACKS_NAME).read_text()
    assert "in _try_get_data" in stacks and "in _worker_loop" in stacks
    assert "No micro-batch has been read." in stacks
