"""Trainings cut and resumed with other layouts: `python -m tests.faults.layouts` tries 100 sequences, here six."""

from __future__ import annotations

import subprocess
import sys


def test_each_row_is_trained_once_whatever_the_layouts_of_the_parts() -> None:
    # A process of its own, since parts are forked from it.
    command = [sys.executable, "-m", "tests.faults.layouts", "--sequences", "6", "--seed", "2"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert output.returncode == 0, output.stdout + output.stderr
    assert "0 with rows lost or doubled" in output.stdout
