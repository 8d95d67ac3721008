"""A Trainer as bytes: what arrives in another process, and what stays behind."""

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


class Follows(TrainerCallback):
    """Keeps the Trainer."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.evaluations = 0

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluations += 1


def trained(folder: Path, **changes: Any) -> Any:
    follows = Follows()
    trainer = searched_trainer(
        folder,
        eval_strategy="steps",
        eval_steps=1,
        given={"callbacks": [follows], **changes.pop("given", {})},
        **changes,
    )
    follows.trainer = trainer
    trainer.train()
    trainer.evaluate()
    return trainer


def test_the_trainer_that_arrives_trains_to_the_same_numbers_with_its_callbacks(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    arrived = unpack(pack(trainer))
    follows = next(one for one in arrived.callback_handler.callbacks if isinstance(one, Follows))
    assert follows.trainer is arrived is not trainer and follows.evaluations == 3
    expected = trainer.train().training_loss, trainer.evaluate()["eval_loss"]
    assert (arrived.train().training_loss, arrived.evaluate()["eval_loss"]) == expected


def test_a_lightning_callback_used_by_a_training_is_sent_too(tmp_path: Path) -> None:
    trainer = trained(tmp_path, given={"callbacks": [TQDMProgressBar()]})
    arrived = unpack(pack(trainer))
    arrived.train()
    assert [type(each) for each in arrived.lightning_callbacks] == [TQDMProgressBar]


def test_model_optimizer_and_lightning_objects_are_not_sent(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    large = 100 * sum(row["x"].numel() for row in vector_rows(7, seed=1))
    trainer.model.ballast = torch.zeros(large)
    data = pack(trainer)
    assert len(data) < 4 * large
    arrived = unpack(data)
    handler = arrived.callback_handler
    assert arrived.model is arrived.optimizer is arrived.lr_scheduler is arrived.lightning_trainer is None
    assert handler.model is handler.optimizer is handler.lr_scheduler is handler.train_dataloader is None
    assert arrived.accelerator is not trainer.accelerator and arrived.accelerator._args is arrived.args


def test_a_tracker_begins_a_separate_run(tmp_path: Path) -> None:
    trainer = trained(
        tmp_path, report_to="tensorboard", logging_strategy="steps", logging_steps=1, logging_dir=str(tmp_path / "here")
    )
    # As the last evaluation has left it, with a file open.
    assert trainer.callback_handler.callbacks[1].tb_writer is not None
    arrived = unpack(pack(trainer))
    arrived.args.logging_dir = str(tmp_path / "there")
    arrived.train()
    events = EventAccumulator(str(tmp_path / "there"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2]


def test_without_cloudpickle_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = searched_trainer(tmp_path)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match="pip install cloudpickle"):
        pack(trainer)
