"""The attributes of a Trainer that its session stores: copies, pickles and deletion."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from littrainer import Trainer
from littrainer.checkpoint.layout import RUN_RECORD_NAME
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_trainer


def make_sgd_trainer(folder: Path) -> Trainer:
    model = VectorClassifier()
    return quiet_trainer(
        folder, model, trainer_kwargs={"optimizers": (torch.optim.SGD(model.parameters(), 0.1), None)}, max_steps=2
    )


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda trainer: pickle.loads(pickle.dumps(trainer))])
def test_a_deep_copy_and_a_pickle_train_with_the_optimizer_that_was_passed(tmp_path: Path, copied: Any) -> None:
    trainer = make_sgd_trainer(tmp_path)
    other = copied(trainer)
    other.train()
    assert type(other.optimizer) is torch.optim.SGD and other.optimizer is not trainer.optimizer
    originals = {id(parameter) for parameter in trainer.model.parameters()}
    assert not any(id(parameter) in originals for parameter in other.optimizer.param_groups[0]["params"])
    assert trainer.lr_scheduler is None and trainer.state.global_step == 0
    assert pickle.loads(pickle.dumps(trainer.accelerator)).gradient_state.sync_gradients


def test_a_shallow_copy_has_separate_attributes(tmp_path: Path) -> None:
    trainer = make_sgd_trainer(tmp_path)
    other = copy.copy(trainer)
    assert other.optimizer is trainer.optimizer
    other.optimizer, other.is_in_train, other.current_flos = None, True, 5
    assert trainer.optimizer is not None and not trainer.is_in_train and trainer.current_flos == 0


@pytest.mark.parametrize("name", ["optimizer", "lr_scheduler", "is_in_train", "_eval_dataloaders", "deepspeed"])
def test_an_attribute_can_be_patched_and_deleted(tmp_path: Path, name: str) -> None:
    trainer = make_sgd_trainer(tmp_path)
    before = getattr(trainer, name)
    with mock.patch.object(trainer, name, "patched"):
        assert getattr(trainer, name) == "patched"
    assert getattr(trainer, name) is before
    delattr(trainer, name)
    assert not hasattr(trainer, name)


def test_a_record_of_the_run_that_cannot_be_read_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Path.read_bytes

    def fail_for_record(path: Path) -> bytes:
        if path.name == RUN_RECORD_NAME:
            raise OSError(5, "Input/output error")
        return original(path)

    (tmp_path / RUN_RECORD_NAME).write_text("{}")
    monkeypatch.setattr(Path, "read_bytes", fail_for_record)
    trainer = quiet_trainer(tmp_path, max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
