"""What tests of searches share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def quick_collections() -> Iterator[None]:
    """A trial collects garbage at its end; what the libraries hold would make that longer than the trial."""
    gc.freeze()
    yield
    gc.unfreeze()
