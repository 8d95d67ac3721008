"""A few random faults of each script in this folder; `python -m tests.faults.NAME` injects more."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.faults.remote_folder import FINE, KINDS, run_schedules


def run_script(script: str, *options: str) -> str:
    """Run a script in a new process, from which it forks, and return its output."""
    command = [sys.executable, "-m", f"tests.faults.{script}", *options]
    output = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert output.returncode == 0, output.stdout + output.stderr
    return output.stdout


def test_a_killed_run_resumes_to_the_same_weights_and_loses_no_checkpoint() -> None:
    assert "'exact': 3" in run_script("kills", "--kills", "3", "--seed", "1")


@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked, and ended by signals of POSIX")
def test_runs_with_faults_end_with_the_weights_of_runs_without() -> None:
    printed = run_script("chaos", "--schedules", "6", "--at-once", "2")
    assert "4 ended with the same weights bit for bit\n   2 ended with the same weights within 1e-5" in printed
    assert all(kind in printed for kind in ("kill", "stop", "raise", "disk", "cut upload"))
    assert re.search(r" [0-3] optimizer steps lost at a fault, at most; saves are 3 apart", printed)


def test_nonfinite_numbers_are_reported_at_the_next_log_and_rolled_back_exactly() -> None:
    printed = run_script("numbers", "--faults", "4", "--in-two-processes", "2", "--seed", "3")
    assert "in 1 process: {'well': 4}" in printed and "in 2 processes: {'well': 2}" in printed


def test_each_row_is_trained_once_whatever_the_layouts_of_the_parts() -> None:
    assert "0 with rows lost or doubled" in run_script("layouts", "--sequences", "6", "--seed", "2")


def test_a_run_at_an_unreliable_url_resumes_exactly_or_names_the_url() -> None:
    results = run_schedules(len(KINDS), seed=3)
    assert {name for counts in results.values() for name in +counts} <= FINE
    assert all(results[kind]["exact"] == 1 for kind in KINDS)
    assert sum(counts["faults"] for counts in results.values()) >= 6
