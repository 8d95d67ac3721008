"""A disk that is full when a checkpoint is written."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_trainer

SETTINGS: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "logging_strategy": "steps"}
LAST_GOOD, FULL_AT = 2, 4


def fill_disk_at(monkeypatch: pytest.MonkeyPatch, step: int, owner: Any, name: str, argument: int) -> None:
    """Let a writing function fail, with half a file left behind, for files of one checkpoint."""
    original = getattr(owner, name)

    def write(*arguments: Any, **keywords: Any) -> Any:
        path = Path(arguments[argument])
        if path.parent.name == f"checkpoint-{step}":
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, name, write)


FULL: dict[str, Callable[[pytest.MonkeyPatch, int], None]] = {
    "weights": lambda patch, step: fill_disk_at(patch, step, safetensors.torch, "save_file", 1),
    "torch.save": lambda patch, step: fill_disk_at(patch, step, torch, "save", 1),
    "state": lambda patch, step: fill_disk_at(patch, step, Path, "write_text", 0),
}


@pytest.mark.parametrize("what", FULL)
def test_a_full_disk_is_an_error_and_the_checkpoint_before_it_still_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    whole = quiet_trainer(tmp_path / "whole", logging_steps=1, **SETTINGS)
    whole.train()

    trainer = quiet_trainer(tmp_path / "full", logging_steps=1, **SETTINGS)
    with monkeypatch.context() as patch:
        FULL[what](patch, FULL_AT)
        with pytest.raises(OSError, match="No space left on device") as caught:
            trainer.train()
    assert caught.value.errno == errno.ENOSPC
    assert not trainer.is_in_train and trainer.state.global_step == FULL_AT

    resumed = quiet_trainer(tmp_path / "full", VectorClassifier(), logging_steps=1, **SETTINGS)
    resumed.train(resume_from_checkpoint=str(tmp_path / "full" / f"checkpoint-{LAST_GOOD}"))
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor)


def test_a_full_disk_at_the_first_checkpoint_deletes_no_checkpoint_of_an_earlier_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SETTINGS, "save_total_limit": 1}
    quiet_trainer(tmp_path, **settings).train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-6"]
    FULL["weights"](monkeypatch, 2)
    with pytest.raises(OSError, match="No space"):
        quiet_trainer(tmp_path, **settings).train()
    assert (tmp_path / "checkpoint-6" / "trainer_state.json").is_file()
