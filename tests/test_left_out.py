"""The list of what `make test` leaves out is true."""

from __future__ import annotations

from pathlib import Path

from tests.left_out import LEFT_OUT

TESTS = Path(__file__).parent


def test_all_that_is_listed_is_there() -> None:
    for name in LEFT_OUT:
        path, _, test = name.partition("::")
        assert (TESTS / path).exists(), name
        assert not test or f"def {test}(" in (TESTS / path).read_text(), name
