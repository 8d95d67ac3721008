"""Numbers that go wrong in trainings: `python -m tests.faults.numbers` tries 60 and 20 in two processes, here a few."""

from __future__ import annotations

import subprocess
import sys


def test_what_goes_wrong_is_told_at_the_next_log_and_rolled_back_to_the_weights_of_data_without_it() -> None:
    # A process of its own, whose log handlers no other test has touched.
    command = [sys.executable, "-m", "tests.faults.numbers", "--faults", "4", "--in-two-processes", "2", "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert "in 1 process: {'well': 4}" in done.stdout and "in 2 processes: {'well': 2}" in done.stdout, done
    assert done.returncode == 0
