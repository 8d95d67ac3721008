"""The code of README, CONTRIBUTING and each page under docs/ is executed from top to bottom."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import COMMANDS, ROOT, blocks_of, pages
from tests.docs.command_lines import command_lines_of
from tests.docs.forks import Forks
from tests.docs.not_executed import NOT_EXECUTED, OUTPUT_TESTED_BY
from tests.docs.page_run import environment_of_a_page, run_page

WITH_CODE = [page for page in pages() if blocks_of(page)]


@pytest.mark.parametrize("page", WITH_CODE)
def test_the_code_of_the_page_runs_and_shows_what_the_page_says(page: str, forks: Forks, tmp_path: Path) -> None:
    folder, log = tmp_path / "work", tmp_path / "log"
    folder.mkdir()
    status = forks.run(
        run_page,
        page,
        str(ROOT),
        str(log),
        folder=str(folder),
        environment=environment_of_a_page(),
        log=str(log),
    )
    if status != 0:
        pytest.fail(f"{page}, status {status}:\n{log.read_text(encoding='utf-8', errors='replace')[-8000:]}", False)


@pytest.mark.parametrize("page", NOT_EXECUTED)
def test_excluded_pages_are_listed(page: str) -> None:
    blocks = blocks_of(page)
    lines = [line.text for block in blocks if block.language in COMMANDS for line in command_lines_of(block)]
    texts = [*(block.code for block in blocks), *lines]
    for beginning, reason in NOT_EXECUTED[page].items():
        assert reason and any(text.startswith(beginning) for text in texts), f"{beginning!r} is not on {page}"


@pytest.mark.parametrize("page", OUTPUT_TESTED_BY)
def test_output_that_another_test_is_about_is_that_of_this_page(page: str) -> None:
    assert Path(page).name in (ROOT / OUTPUT_TESTED_BY[page]).read_text(encoding="utf-8")
