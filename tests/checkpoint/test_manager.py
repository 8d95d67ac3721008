"""The choice of a checkpoint by several processes, played by this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from littrainer.checkpoint import manager
from littrainer.checkpoint.manager import CheckpointManager
from tests.scenarios.trainers import quiet_arguments, quiet_trainer


def test_a_last_checkpoint_that_is_damaged_on_another_disk_is_refused_and_not_chosen_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = quiet_trainer(tmp_path, max_steps=2, save_steps=2, save_strategy="steps")
    trainer.train()
    pushed = (tmp_path / "checkpoint-2").rename(tmp_path / "last-checkpoint")
    monkeypatch.setattr(manager, "is_distributed", lambda: True)
    monkeypatch.setattr(manager, "_find_problem", lambda folder, *_: f"node-1: {folder.name} is damaged.")
    checkpoints: CheckpointManager = trainer.session.checkpoints
    with pytest.raises(ValueError, match=r"cannot be resumed in all processes\. Process 0 on node-1"):
        checkpoints.restore("last-checkpoint", quiet_arguments(tmp_path), [], lambda folder: None)
    assert pushed.is_dir()
