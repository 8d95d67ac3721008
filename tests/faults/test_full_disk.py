"""A full disk during a save."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from littrainer import Trainer
from littrainer.checkpoint import writer
from littrainer.checkpoint.verification import find_damage
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_trainer

SETTINGS: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "logging_strategy": "steps"}
LAST_GOOD, FULL_AT = 2, 4


def fill_disk_at(
    monkeypatch: pytest.MonkeyPatch, step: int, owner: Any, name: str, path_of: Callable[..., Any], only: str = ""
) -> None:
    """Make a writing function fail after half a file of a checkpoint.

    Parameters:
        path_of: returns the path from the function's arguments.
        only: the file to fail at; any by default.
    """
    original = getattr(owner, name)

    def write(*arguments: Any, **keywords: Any) -> Any:
        path = Path(path_of(*arguments))
        if path.parent.name == f"checkpoint-{step}" and only in path.name:
            if path.parent.is_dir():
                path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, name, write)


def path_of_descriptor(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


FULL: dict[str, Callable[[pytest.MonkeyPatch, int], None]] = {
    "folder": lambda patch, step: fill_disk_at(patch, step, Path, "mkdir", lambda path, *_: path / "x"),
    "weights": lambda patch, step: fill_disk_at(patch, step, safetensors.torch, "save_file", lambda _, path: path),
    "arguments": lambda patch, step: fill_disk_at(patch, step, writer, "write_arguments", lambda _, path: path),
    "optimizer": lambda patch, step: fill_disk_at(patch, step, torch, "save", lambda _, path: path, "optimizer.pt"),
    "state": lambda patch, step: fill_disk_at(patch, step, Path, "write_text", lambda path, *_: path),
    "manifest": lambda patch, step: fill_disk_at(patch, step, os, "replace", lambda _, path: path),
    # File systems may allocate space at fsync.
    "fsync": lambda patch, step: fill_disk_at(patch, step, os, "fsync", path_of_descriptor, "optimizer.pt"),
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A training with enough disk space."""
    trainer = quiet_trainer(tmp_path_factory.mktemp("whole"), logging_steps=1, **SETTINGS)
    trainer.train()
    return trainer


@pytest.mark.parametrize("what", FULL)
def test_a_full_disk_is_an_error_and_the_checkpoint_before_it_still_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: Trainer, what: str
) -> None:
    trainer = quiet_trainer(tmp_path / "full", logging_steps=1, save_total_limit=1, **SETTINGS)
    with monkeypatch.context() as patch:
        FULL[what](patch, FULL_AT)
        message = (
            rf"No space left on device: .*checkpoint-{FULL_AT} could not be written.*bytes are free.*Free disk space"
        )
        with pytest.raises(OSError, match=message) as caught:
            trainer.train()
    assert caught.value.errno == errno.ENOSPC
    assert not trainer.is_in_train and trainer.state.global_step == FULL_AT
    assert sorted(os.listdir(tmp_path / "full")) == [f"checkpoint-{LAST_GOOD}", "littrainer_run.json"]
    assert find_damage(tmp_path / "full" / f"checkpoint-{LAST_GOOD}") == []

    resumed = quiet_trainer(tmp_path / "full", VectorClassifier(), logging_steps=1, **SETTINGS)
    resumed.train(resume_from_checkpoint=True)
    for name, tensor in uninterrupted.model.state_dict().items():
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
