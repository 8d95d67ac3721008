"""A Hub on this machine, to which the real client of huggingface_hub is turned for the length of a test."""

from __future__ import annotations

import types
from collections.abc import Iterator

import pytest

from tests.hub.server import Hub, serving


@pytest.fixture
def hub(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A local Hub; nothing can reach another one, no token is logged in, and retries do not wait."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    home = tmp_path_factory.mktemp("hub home")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with serving() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "cache"))
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        monkeypatch.setattr(_http, "time", types.SimpleNamespace(sleep=lambda seconds: None))
        monkeypatch.setattr("littrainer.hub.repository.WAITS", (0.0, 0.0))
        monkeypatch.setattr("littrainer.hub.transfer._without_xet", set())
        yield running
