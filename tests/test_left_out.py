"""The list of what `make test` leaves out is true, and what is on it is left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.left_out import LEFT_OUT

TESTS = Path(__file__).parent


def test_all_that_is_listed_is_there() -> None:
    for name in LEFT_OUT:
        path, _, test = name.partition("::")
        assert (TESTS / path).exists(), name
        assert not test or f"def {test}(" in (TESTS / path).read_text(), name


def test_what_is_listed_is_left_out_with_quick_alone_and_told() -> None:
    def output(*options: str) -> str:
        chosen = ["tests/faults/test_kills.py", "tests/fidelity/test_fidelity.py", "tests/hub", *options]
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", *chosen]
        return subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False).stdout

    whole, quick = output(), output("--quick")
    listed, in_file = "test_a_plain_lightning_program_is_killed", "tests/hub/test_pushing_together.py::"
    tests = {line for line in quick.splitlines() if line.startswith("tests/")}
    assert tests < set(whole.splitlines()) and listed in whole and in_file in whole
    assert not any(listed in line or line.startswith(in_file) for line in tests)
    assert "left out; `make test-all` runs everything" in quick and listed in quick and "left out" not in whole
    compared = [line for line in tests if "test_a_run_leaves_what_transformers_own_trainer_leaves" in line]
    # One of each topic at least, and few enough for five minutes.
    assert 25 < len(compared) < 60
