from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from littrainer.tracking.swanlab import SwanLabCallback


def badge(log_model: str | None, run: Any) -> str | None:
    """What the callback says of a run, without SwanLab, which it asks for when it is made."""
    callback = SwanLabCallback.__new__(SwanLabCallback)
    callback._swanlab, callback._log_model = SimpleNamespace(get_run=lambda: run), log_model
    return callback.card_badge()


def test_a_badge_links_to_a_run_in_the_cloud_where_the_environment_asks_for_it() -> None:
    address = "https://swanlab.cn/@me/mine/runs/1"
    run = SimpleNamespace(public=SimpleNamespace(cloud=SimpleNamespace(experiment_url=address)))
    assert str(badge("checkpoint", run)).endswith(f"({address})")
    assert badge(None, run) is None
    assert badge("checkpoint", None) is None
    assert badge("checkpoint", SimpleNamespace(public=None)) is None
