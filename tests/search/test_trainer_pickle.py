"""Serialization of a Trainer for another process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from littrainer import TrainerCallback
from littrainer.search.trainer_pickle import pack, unpack
from tests.scenarios.data import vector_rows
from tests.search.trainers import searched_trainer


class RefersToTrainer(TrainerCallback):
    """A callback that refers to the Trainer."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.evaluations = 0

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluations += 1


def train_trainer(folder: Path, **changes: Any) -> Any:
    follower = RefersToTrainer()
    trainer = searched_trainer(
        folder,
        eval_strategy="steps",
        eval_steps=1,
        trainer_kwargs={"callbacks": [follower], **changes.pop("trainer_kwargs", {})},
        **changes,
    )
    follower.trainer = trainer
    trainer.train()
    trainer.evaluate()
    return trainer


def test_the_unpickled_trainer_has_the_same_numbers_and_callbacks(tmp_path: Path) -> None:
    trainer = train_trainer(tmp_path)
    unpickled = unpack(pack(trainer))
    follower = next(
        callback for callback in unpickled.callback_handler.callbacks if isinstance(callback, RefersToTrainer)
    )
    assert follower.trainer is unpickled is not trainer and follower.evaluations == 3
    expected = trainer.train().training_loss, trainer.evaluate()["eval_loss"]
    assert (unpickled.train().training_loss, unpickled.evaluate()["eval_loss"]) == expected


def test_a_lightning_callback_used_by_a_training_is_sent_too(tmp_path: Path) -> None:
    trainer = train_trainer(tmp_path, trainer_kwargs={"callbacks": [TQDMProgressBar()]})
    unpickled = unpack(pack(trainer))
    unpickled.train()
    assert [type(callback) for callback in unpickled.lightning_callbacks] == [TQDMProgressBar]


def test_model_optimizer_and_lightning_objects_are_not_sent(tmp_path: Path) -> None:
    trainer = train_trainer(tmp_path)
    large = 100 * sum(row["x"].numel() for row in vector_rows(7, seed=1))
    trainer.model.ballast = torch.zeros(large)
    data = pack(trainer)
    assert len(data) < 4 * large
    unpickled = unpack(data)
    handler = unpickled.callback_handler
    assert unpickled.model is unpickled.optimizer is unpickled.lr_scheduler is unpickled.lightning_trainer is None
    assert handler.model is handler.optimizer is handler.lr_scheduler is handler.train_dataloader is None
    assert unpickled.accelerator is not trainer.accelerator and unpickled.accelerator._args is unpickled.args


def test_a_tracker_begins_a_separate_run(tmp_path: Path) -> None:
    trainer = train_trainer(
        tmp_path, report_to="tensorboard", logging_strategy="steps", logging_steps=1, logging_dir=str(tmp_path / "here")
    )
    # The last evaluation has opened a file.
    assert trainer.callback_handler.callbacks[1].tb_writer is not None
    unpickled = unpack(pack(trainer))
    unpickled.args.logging_dir = str(tmp_path / "there")
    unpickled.train()
    events = EventAccumulator(str(tmp_path / "there"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2]


def test_without_cloudpickle_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = searched_trainer(tmp_path)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match="pip install cloudpickle"):
        pack(trainer)
