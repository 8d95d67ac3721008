"""Long tests come last, and are left out by name where time is short."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest


def item(name: str, limit_seconds: float | None = None, long: bool = True) -> Any:
    return SimpleNamespace(
        name=name,
        config=SimpleNamespace(getoption={"--long-tests-for": limit_seconds}.__getitem__),
        get_closest_marker=lambda marker: marker == "long" if long else None,
    )


def test_long_tests_come_after_all_others_which_keep_their_order() -> None:
    items = [item("a", 60), item("b", 60, long=False), item("c", 60), item("d", 60, long=False)]
    conftest.pytest_collection_modifyitems(items[0].config, items)
    assert "".join(one.name for one in items) == "bdac"


def test_without_a_limit_the_order_stays() -> None:
    items = [item("a"), item("b", long=False)]
    conftest.pytest_collection_modifyitems(items[0].config, items)
    assert "".join(one.name for one in items) == "ab"


@pytest.mark.parametrize(
    ("limit_seconds", "long", "is_left_out"),
    [(60, True, True), (180, True, False), (60, False, False), (None, True, False)],
)
def test_a_long_test_that_would_begin_too_late_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, limit_seconds: float | None, long: bool, is_left_out: bool
) -> None:
    monkeypatch.setattr(conftest, "STARTED", 0.0)
    monkeypatch.setattr(conftest.time, "monotonic", lambda: 120.0)
    if is_left_out:
        with pytest.raises(pytest.skip.Exception, match="left out: the tests have taken more than 60 s"):
            conftest.pytest_runtest_setup(item("a", limit_seconds, long))
    else:
        conftest.pytest_runtest_setup(item("a", limit_seconds, long))
