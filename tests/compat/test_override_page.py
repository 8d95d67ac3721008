"""Tables of override points in docs/api/compatibility.md."""

from __future__ import annotations

from pathlib import Path

from littrainer.loop.overrides import NEVER_CALLED, SIGNATURES
from tests.compat.override_page import TABLE, format_rows, record_calls
from tests.compat.page import PAGE, table
from tests.scenarios.overrides import OVERRIDE_POINTS


def test_the_page_lists_the_calls_of_our_trainer(tmp_path: Path) -> None:
    calls = record_calls(tmp_path)
    rows = TABLE.search(PAGE.read_text("utf-8"))
    assert rows is not None and rows[0] == format_rows(calls), f"run: python -m tests.compat.override_page {PAGE}"
    assert set(OVERRIDE_POINTS) - {"training_step"} == {name for run in calls for name in run}
    assert table("method | may lack") == {
        name: ", ".join(f"`{parameter}`" for parameter in (*signature.by_place, *signature.by_keyword))
        for name, signature in SIGNATURES.items()
    }
    assert table("method | what to do instead") == NEVER_CALLED
