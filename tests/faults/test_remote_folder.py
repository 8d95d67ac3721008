"""Six schedules; `python -m tests.faults.remote_folder` runs 200."""

from __future__ import annotations

from tests.faults.remote_folder import FINE, KINDS, run_schedules


def test_a_run_at_an_address_that_lies_resumes_exactly_or_names_the_address() -> None:
    results = run_schedules(6, seed=3)
    assert {name for counts in results.values() for name in +counts} <= FINE
    assert all(results[kind]["exact"] == 1 for kind in KINDS)
    assert sum(counts["faults"] for counts in results.values()) >= 6
