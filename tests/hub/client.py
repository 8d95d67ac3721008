"""Redirection of huggingface_hub's client to a local Hub."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from tests.hub.server import Hub


def turn_client_to(hub: Hub, home: Path, patch: pytest.MonkeyPatch) -> None:
    """Redirect all requests to a Hub, without a logged-in token and without delays before retries.

    Parameters:
        home: a folder for the client's files.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        patch.delenv(name, raising=False)
    patch.setattr(constants, "ENDPOINT", hub.endpoint)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
    patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    patch.setattr(constants, "HF_HUB_CACHE", str(home / "cache"))
    patch.setenv("HF_ENDPOINT", hub.endpoint)
    patch.setattr(_http, "time", types.SimpleNamespace(sleep=lambda seconds: None))
