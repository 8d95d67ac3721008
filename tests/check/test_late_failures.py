"""Sample of the scripts that fail late; `make soak` checks all of them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.check.late_failures.__main__ import SCRIPTS, expected, names
from tests.compat.processes import run_python

SAMPLE = (
    "metric_name_wrong",
    "metrics_of_full_batches_only",
    "tokenizer_cannot_be_saved",
    "disk_too_small",
    "best_model_does_not_load",
    "generates_beyond_positions",
    "state_that_is_not_saved",
    "nan_in_a_late_row",
    "digits.py",
)


def test_late_failures_of_a_sample_are_detected_and_an_example_passes() -> None:
    done = run_python("-m", "tests.check.late_failures", *SAMPLE, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nexamples: 1 of 1 are called good\nlate failures: 8 of 8 found" in done.stdout, done.stdout


def test_each_script_has_an_expected_failure_and_cites_public_reports_only() -> None:
    assert names()
    assert [name for name in names() if not expected(name) or expected(name).startswith("#")] == []
    lines = "".join(path.read_text(encoding="utf-8") for path in SCRIPTS.glob("*.py"))
    cited = re.findall(r"^# Seen: (.*)$", lines, re.MULTILINE)
    assert cited and all(re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", link) for link in cited)


def test_the_script_without_a_failure_passes() -> None:
    done = run_python("-m", "littrainer", "check", str(SCRIPTS / "sound.py"), cwd=SCRIPTS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\nNothing was found that would fail.\n")
