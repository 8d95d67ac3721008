"""Runs that are killed: `python -m tests.faults.kills` kills 50 times, here a few."""

from __future__ import annotations

import subprocess
import sys


def test_a_killed_run_resumes_to_the_same_weights_and_loses_no_checkpoint() -> None:
    # A process of its own, since runs are forked from it.
    command = [sys.executable, "-m", "tests.faults.kills", "--kills", "3", "--seed", "1"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert output.returncode == 0, output.stderr
    assert "'exact': 3" in output.stdout
