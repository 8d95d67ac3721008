"""A Hub on this machine, to which the real client of huggingface_hub is turned for the length of a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hub.client import turn_client_to
from tests.hub.server import Hub, serving


@pytest.fixture
def hub(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A local Hub; nothing can reach another one, no token is logged in, and retries do not wait."""
    home = tmp_path_factory.mktemp("hub home")
    with serving() as running:
        turn_client_to(running, home, monkeypatch)
        yield running
