"""Hyperparameter searches in two processes, with the checks in `searching_process`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import searching_process
from tests.distributed.checks import assert_passed, run_checks_in_processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the outcomes of the checks."""
    return run_checks_in_processes(tmp_path_factory, searching_process.__name__)


@pytest.mark.parametrize("check", [check.__name__ for check in searching_process.CHECKS])
def test_searches_in_two_processes(folder: Path, check: str) -> None:
    assert_passed(folder, check)
