"""Runs that are killed: `python -m tests.faults.kills` kills 50 times, here a few."""

from __future__ import annotations

import re
import subprocess
import sys


def printed_after(kills: int, trainer: str) -> str:
    # A process of its own, since runs are forked from it.
    command = [sys.executable, "-m", "tests.faults.kills", "--kills", str(kills), "--trainer", trainer, "--seed", "1"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert output.returncode == 0, output.stderr
    return output.stdout


def test_a_killed_run_resumes_to_the_same_weights_and_loses_no_checkpoint() -> None:
    assert "'exact': 3" in printed_after(3, "littrainer")


def test_a_plain_lightning_program_is_killed_and_resumed_for_comparison() -> None:
    # The moment decides which: before its first checkpoint it begins anew.
    printed = printed_after(1, "lightning")
    assert re.fullmatch(r"lightning, killed 1 times: \{'(exact|different)': 1\}\n", printed), printed
