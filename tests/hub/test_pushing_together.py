"""In a distributed training the first process pushes, and nothing is sent twice."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from tests.distributed.process_launch import run_in_processes
from tests.hub.runs import files_below
from tests.hub.server import Hub
from tests.hub.test_pushing import CHECKPOINT_STRATEGIES, below


def test_the_first_process_alone_pushes_what_both_have_written(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    run_in_processes("tests.hub.pushing_process", tmp_path)
    first, second = (pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(2))
    assert first["step"] == second["step"] == 6
    assert (first["id"], second["id"]) == ("someone/run", None)
    # `save_model` has pushed the model already.
    assert first["commits"] == ["Model save", "by hand"] and second["commits"] == [None, None]
    assert hub.repository().messages()[: len(CHECKPOINT_STRATEGIES)] == CHECKPOINT_STRATEGIES
    assert len(hub.requested("POST /api/repos/create")) == 1
    pushed = below("last-checkpoint/", hub.repository().files())
    assert pushed == files_below(tmp_path / "run" / "checkpoint-6")
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= pushed.keys()
    card = hub.repository().files()["README.md"]
    assert card == (tmp_path / "run" / "README.md").read_bytes()
    assert b"2 processes, cpu" in card
