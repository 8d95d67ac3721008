"""The fixture of a local Hub for the real client of huggingface_hub."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hub.client import turn_client_to
from tests.hub.server import Hub, serving


@pytest.fixture
def hub(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Redirect all requests to a local Hub, without a logged-in token."""
    home = tmp_path_factory.mktemp("hub home")
    with serving() as running:
        turn_client_to(running, home, monkeypatch)
        yield running
