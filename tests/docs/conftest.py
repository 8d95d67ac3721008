"""Starts a process with the libraries imported, for all pages that a worker executes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.docs.forks import Forks, forks_of_a_fresh_process


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    with forks_of_a_fresh_process() as started:
        yield started
