"""The tables of override points in docs/api/compatibility.md are what our Trainer does."""

from __future__ import annotations

from pathlib import Path

from littrainer.loop.overrides import NEVER_CALLED, SIGNATURES
from tests.compat.override_page import TABLE, measured_calls, rows
from tests.compat.page import PAGE, table
from tests.scenarios.overrides import OVERRIDE_POINTS


def test_the_page_has_the_calls_that_our_trainer_makes(tmp_path: Path) -> None:
    calls = measured_calls(tmp_path)
    found = TABLE.search(PAGE.read_text("utf-8"))
    assert found is not None and found[0] == rows(calls), f"run: python -m tests.compat.override_page {PAGE}"
    assert set(OVERRIDE_POINTS) - {"training_step"} == {name for found in calls for name in found}
    added = {name: (*one.by_place, *one.by_keyword) for name, one in SIGNATURES.items()}
    assert table("method | may lack") == {name: ", ".join(f"`{one}`" for one in more) for name, more in added.items()}
    assert table("method | what to do instead") == NEVER_CALLED
