"""The table of override points in docs/compatibility.md is what our Trainer does."""

from __future__ import annotations

from pathlib import Path

from tests.compat.override_page import measured_calls, section, with_section
from tests.scenarios.overrides import OVERRIDE_POINTS

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def test_the_page_has_the_calls_that_our_trainer_makes(tmp_path: Path) -> None:
    calls = measured_calls(tmp_path)
    written = PAGE.read_text("utf-8")
    assert written == with_section(written, section(calls)), "run: python -m tests.compat.override_page " + str(PAGE)
    called = {name for found in calls for name in found}
    assert set(OVERRIDE_POINTS) - {"training_step"} == called
