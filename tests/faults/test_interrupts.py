"""Ctrl-C during training."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from littrainer import TrainerCallback
from tests.faults.failing import PLACES, Fuse
from tests.scenarios.trainers import quiet_trainer


@pytest.fixture
def handler() -> Iterator[Any]:
    """A handler of the user's own for Ctrl-C, which raises as Python's does."""

    def own(number: int, frame: Any) -> None:
        raise KeyboardInterrupt("by the user's own handler")

    before = signal.signal(signal.SIGINT, own)
    yield own
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("place", ["on_step_end", "forward", "collator", "on_prediction_step", "compute_metrics"])
def test_an_interrupt_anywhere_in_training_reaches_the_caller_as_one(tmp_path: Path, handler: Any, place: str) -> None:
    trainer = PLACES[place](tmp_path, Fuse(KeyboardInterrupt("stop")))
    with pytest.raises(KeyboardInterrupt, match="stop"):
        trainer.train()
    assert not trainer.is_in_train and trainer.lightning_module is None
    assert signal.getsignal(signal.SIGINT) is handler
    assert trainer.train().global_step == 3


class SignalAt(TrainerCallback):
    """Presses Ctrl-C at an optimizer step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_is_answered_by_the_handler_that_was_there(tmp_path: Path, handler: Any) -> None:
    trainer = quiet_trainer(tmp_path, given={"callbacks": [SignalAt(2)]}, max_steps=5)
    with pytest.raises(KeyboardInterrupt, match="by the user's own handler"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert signal.getsignal(signal.SIGINT) is handler


def test_checkpoints_made_before_an_interrupt_resume(tmp_path: Path, handler: Any) -> None:
    settings: dict[str, Any] = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2}
    with pytest.raises(KeyboardInterrupt):
        quiet_trainer(tmp_path, given={"callbacks": [SignalAt(3)]}, **settings).train()
    resumed = quiet_trainer(tmp_path, **settings)
    assert resumed.train(resume_from_checkpoint=True).global_step == 5


def test_a_training_in_another_thread_leaves_the_handler_alone(tmp_path: Path, handler: Any) -> None:
    outputs: list[Any] = []
    trainer = quiet_trainer(tmp_path, max_steps=2)
    thread = threading.Thread(target=lambda: outputs.append(trainer.train()))
    thread.start()
    thread.join(60)
    assert outputs and outputs[0].global_step == 2
    assert signal.getsignal(signal.SIGINT) is handler
