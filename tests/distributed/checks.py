"""Checks that run in two processes: each process asserts its results, and a test reads the outcome."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from tests.distributed.process_launch import PROCESSES, run_in_processes
from tests.scenarios.once_per_session import run_once

Check = Callable[[Path], None]


def run_checks(
    checks: Sequence[Check], folder: Path, within: Callable[[Path], AbstractContextManager[None]] = nullcontext
) -> None:
    """Run checks, each in a separate folder, and write their outcomes to `RANK.json`.

    Parameters:
        checks: functions that assert only after all exchanges, so that all processes reach the next check.
        within: creates a context for each check, from a separate path.
    """
    outcomes = {}
    for check in checks:
        try:
            with within(folder / f"context-of-{check.__name__}"):
                check(folder / check.__name__)
        except Exception as error:
            text = traceback.TracebackException.from_exception(error, capture_locals=True)
            outcomes[check.__name__] = "".join(text.format())
        else:
            outcomes[check.__name__] = "passed"
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(outcomes))


def run_checks_in_processes(factory: pytest.TempPathFactory, module: str, has_rendezvous: bool = True) -> Path:
    """Run a module's checks in two processes, once for all tests, and return their folder."""

    def run(folder: Path) -> None:
        run_in_processes(module, folder, has_rendezvous)

    return run_once(factory, module, run)


def assert_passed(folder: Path, check: str) -> None:
    """Assert that a check has passed in both processes."""
    for rank in range(PROCESSES):
        outcome = json.loads((folder / f"{rank}.json").read_text())[check]
        assert outcome == "passed", f"In process {rank}:\n{outcome}"
