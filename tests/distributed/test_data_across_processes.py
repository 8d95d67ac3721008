"""Data in two processes, with the checks in `data_process`: exact resumes, unequal lengths, dispatching, order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import data_process
from tests.distributed.checks import assert_passed, run_checks_in_processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the outcomes of the checks."""
    return run_checks_in_processes(tmp_path_factory, data_process.__name__)


@pytest.mark.parametrize("check", [check.__name__ for check in data_process.CHECKS])
def test_two_processes_share_data(folder: Path, check: str) -> None:
    assert_passed(folder, check)
