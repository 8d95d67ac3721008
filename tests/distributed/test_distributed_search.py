"""Two processes that search together, as `searching_process` tries it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import searching_process
from tests.distributed.checks import assert_well, endings_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes, started once for all tests, wrote how the checks ended."""
    return endings_of(tmp_path_factory, searching_process.__name__)


@pytest.mark.parametrize("check", [check.__name__ for check in searching_process.CHECKS])
def test_two_processes_search_together(folder: Path, check: str) -> None:
    assert_well(folder, check)
