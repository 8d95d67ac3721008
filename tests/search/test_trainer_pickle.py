"""A Trainer as bytes: what arrives in another process, and what stays behind."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from littrainer import TrainerCallback
from littrainer.search.trainer_pickle import packed, unpacked
from tests.scenarios.data import Rows, vector_rows
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


def test_the_trainer_that_arrives_trains_to_the_same_numbers(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    arrived = unpacked(packed(trainer))
    assert arrived is not trainer
    expected = trainer.train().training_loss, trainer.evaluate()["eval_loss"]
    assert (arrived.train().training_loss, arrived.evaluate()["eval_loss"]) == expected


def test_model_optimizer_and_what_lightning_holds_stay_behind(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    large = sum(row["x"].numel() for row in vector_rows(7, seed=1))
    trainer.model.ballast = torch.zeros(100 * large)
    data = packed(trainer)
    assert len(data) < 4 * 100 * large
    arrived = unpacked(data)
    handler = arrived.callback_handler
    assert arrived.model is arrived.optimizer is arrived.lr_scheduler is arrived.lightning_trainer is None
    assert handler.model is handler.optimizer is handler.lr_scheduler is handler.train_dataloader is None
    assert arrived.accelerator is not trainer.accelerator
    assert arrived.accelerator._args is arrived.args


def test_callbacks_keep_their_state_and_their_trainer(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    arrived = unpacked(packed(trainer))
    follows = next(one for one in arrived.callback_handler.callbacks if isinstance(one, Follows))
    assert follows.trainer is arrived
    assert follows.evaluations == 3


def test_methods_set_on_the_instance_travel_bound_to_it(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path)
    trainer.compute_loss = trainer.compute_loss
    arrived = unpacked(packed(trainer))
    assert arrived.compute_loss.__self__ is arrived
    assert arrived.gather_function.__self__ is arrived


def test_a_tracker_begins_a_run_of_its_own(tmp_path: Path) -> None:
    trainer = trained(
        tmp_path, report_to="tensorboard", logging_strategy="steps", logging_steps=1, logging_dir=str(tmp_path / "here")
    )
    # As the last evaluation has left it, with a file open.
    assert trainer.callback_handler.callbacks[1].tb_writer is not None
    arrived = unpacked(packed(trainer))
    arrived.args.logging_dir = str(tmp_path / "there")
    arrived.train()
    events = EventAccumulator(str(tmp_path / "there"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2]


SCRIPT = """
from dataclasses import dataclass

import torch
from littrainer import Trainer, TrainingArguments
from tests.scenarios.models import VectorClassifier

FACTOR = 2.0

@dataclass
class OwnArguments(TrainingArguments):
    own: float = 0.5

class Model(VectorClassifier):
    pass

def new_model():
    return Model()

class OwnTrainer(Trainer):
    def compute_loss(self, *args, **kwargs):
        return FACTOR * super().compute_loss(*args, **kwargs)
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script as `__main__`."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(SCRIPT, vars(module))
    return module


def test_what_the_script_defines_arrives_where_the_script_was_not_run(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = script.OwnTrainer(
        model_init=script.new_model,
        args=script.OwnArguments(
            str(tmp_path), use_cpu=True, report_to="none", max_steps=2, save_steps=2, disable_tqdm=True, own=0.25
        ),
        train_dataset=Rows(vector_rows(10)),
    )
    data = packed(trainer)
    loss = trainer.train().training_loss
    other = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", other)
    arrived = unpacked(data)
    assert arrived.args.own == 0.25
    assert arrived.train().training_loss == loss
    # Where pickle looks for the class of the arguments that it reads or writes.
    assert vars(other)["OwnArguments"] is type(arrived.args)
    saved = torch.load(tmp_path / "checkpoint-2" / "training_args.bin", weights_only=False)
    assert type(saved) is type(arrived.args)


def test_names_that_the_other_process_has_stay_what_they_are(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = packed(searched_trainer(tmp_path, kind=script.OwnTrainer))
    other: Any = ModuleType("__main__")
    other.OwnTrainer = "its own"
    monkeypatch.setitem(sys.modules, "__main__", other)
    assert type(unpacked(data)).__name__ == "OwnTrainer"
    assert other.OwnTrainer == "its own"


def test_without_cloudpickle_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = searched_trainer(tmp_path)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match=r"pip install 'littrainer\[tune\]'"):
        packed(trainer)
