"""Six schedules; `python -m tests.faults.chaos` runs 50."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest


@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked, and ended by signals of POSIX")
def test_runs_with_faults_end_with_the_weights_of_runs_without() -> None:
    command = [sys.executable, "-m", "tests.faults.chaos", "--schedules", "6", "--at-once", "2"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert output.returncode == 0, output.stdout + output.stderr
    assert "4 ended with the same weights bit for bit\n   2 ended with the same weights within 1e-5" in output.stdout
    assert all(kind in output.stdout for kind in ("kill", "stop", "raise", "disk", "cut upload"))
    assert re.search(r" [0-3] optimizer steps lost at a fault, at most; saves are 3 apart", output.stdout)
