"""Ctrl-C during training."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import Trainer, TrainerCallback
from littrainer.checkpoint.verification import find_damage
from littrainer.checkpoint.weights import read_weights
from tests.faults.signals import SignalIn
from tests.scenarios.other_processes import MAX_WAIT_SECONDS
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer


@pytest.fixture
def handler() -> Iterator[Any]:
    """A user's handler for Ctrl-C, which raises like Python's."""

    def handle(number: int, frame: Any) -> None:
        raise KeyboardInterrupt("by the user's handler")

    before = signal.signal(signal.SIGINT, handle)
    yield handle
    signal.signal(signal.SIGINT, before)


# Forked, since imports are slow.
SCRIPT = """
import os, signal, sys
from littrainer.lightning_adapter.run_lightning import import_lightning
from tests.faults.signals import SignalIn
from tests.scenarios.trainers import quiet_trainer

EVENTS = ("on_train_begin", "on_step_end", "on_prediction_step", "on_save", "on_train_end")
SETTINGS = dict(max_steps=3, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1)
import_lightning()
for place in (*EVENTS, "fork"):
    process = os.fork()
    if not process:
        os.setpgid(0, 0)
        os.kill = lambda to, number, kill=os.kill: kill(0 if to == os.getpid() else to, number)
        armed = [signal.SIGINT] if place == "fork" else []
        os.register_at_fork(after_in_parent=lambda: [os.killpg(0, armed.pop()) for _ in armed[:1]] and None)
        steps = {"on_train_begin": 0, "on_train_end": 3}
        given = {} if armed else {"callbacks": [SignalIn(place, steps.get(place, 1), signal.SIGINT)]}
        folder = os.path.join(sys.argv[1], place)
        quiet_trainer(folder, trainer_kwargs=given, dataloader_num_workers=2, **SETTINGS).train()
        break
    print(place, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


def test_a_script_that_is_interrupted_ends_as_python_does_whatever_it_was_doing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=True, timeout=MAX_WAIT_SECONDS)
    statuses = dict(line.split() for line in done.stdout.splitlines() if line.count(" ") == 1)
    assert len(statuses) == 6 and set(statuses.values()) == {"-2"}, done.stderr


def press_in(event: str, step: int, times: int = 1) -> SignalIn:
    """Return a callback that presses Ctrl-C in an event at an optimizer step."""
    return SignalIn(event, step, signal.SIGINT, times)


def test_a_signal_is_handled_by_the_users_handler(tmp_path: Path, handler: Any) -> None:
    trainer = quiet_trainer(tmp_path, trainer_kwargs={"callbacks": [press_in("on_step_end", 2)]}, max_steps=5)
    with pytest.raises(KeyboardInterrupt, match="by the user's handler"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_training_in_another_thread_does_not_change_the_handler(tmp_path: Path, handler: Any) -> None:
    outputs: list[Any] = []
    trainer = quiet_trainer(tmp_path, max_steps=2)
    thread = threading.Thread(target=lambda: outputs.append(trainer.train()))
    thread.start()
    thread.join(MAX_WAIT_SECONDS)
    assert outputs and outputs[0].global_step == 2
    assert signal.getsignal(signal.SIGINT) is handler


STEPS = 6
# Event and its step -> completed steps when Ctrl-C is raised.
MOMENTS: dict[tuple[str, int], int] = {
    ("on_step_begin", 2): 2,
    # The weights are about to change, or have changed and the step is not yet counted.
    ("on_optimizer_step", 2): 3,
    ("on_log", 3): 3,
    ("on_save", 4): 4,
}


@pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer])
@pytest.mark.parametrize(("event", "step"), MOMENTS)
def test_after_an_interrupt_weights_and_step_count_agree_and_what_is_saved_by_hand_resumes(
    tmp_path: Path, handler: Any, event: str, step: int, kind: type[Trainer]
) -> None:
    settings: dict[str, Any] = {
        "kind": kind,
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": 1,
        "logging_strategy": "steps",
        "logging_steps": 1,
    }
    uninterrupted = quiet_trainer(tmp_path / "whole", **settings)
    uninterrupted.train()
    presses = press_in(event, step)
    stopped = quiet_trainer(tmp_path / "stopped", trainer_kwargs={"callbacks": [presses]}, **settings)
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    done = MOMENTS[event, step]
    assert stopped.state.global_step == done
    expected = read_weights(tmp_path / "whole" / f"checkpoint-{done}")
    assert all(torch.equal(stopped.model.state_dict()[name], tensor) for name, tensor in expected.items())
    stopped.save_model(str(tmp_path / "model"))
    assert all(torch.equal(read_weights(tmp_path / "model")[name], tensor) for name, tensor in expected.items())
    stopped._save_checkpoint(stopped.model, trial=None)
    assert find_damage(tmp_path / "stopped" / f"checkpoint-{done}") == []
    before = [number for number in presses.ended if number <= done]
    presses.ended.clear()
    presses.step = 0
    stopped.train(resume_from_checkpoint=True)
    assert presses.ended == list(range(done + 1, STEPS + 1))
    # Callbacks may miss the step of the interrupt.
    assert before in (list(range(1, done + 1)), list(range(1, done)))
    for name, tensor in uninterrupted.model.state_dict().items():
        assert torch.equal(stopped.model.state_dict()[name], tensor)


def test_a_second_interrupt_is_raised_while_the_first_is_deferred(tmp_path: Path, handler: Any) -> None:
    presses = press_in("on_optimizer_step", 2, times=2)
    trainer = quiet_trainer(tmp_path, trainer_kwargs={"callbacks": [presses]}, max_steps=5)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 2
    assert signal.getsignal(signal.SIGINT) is handler
    trainer.remove_callback(presses)
    assert trainer.train().global_step == 5


def test_a_deferred_interrupt_is_raised_if_the_step_fails(tmp_path: Path, handler: Any) -> None:
    class Failing(TrainerCallback):
        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            raise OverflowError("of the callback")

    callbacks = [press_in("on_optimizer_step", 0), Failing()]
    trainer = quiet_trainer(tmp_path, trainer_kwargs={"callbacks": callbacks}, max_steps=5)
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.train()
    assert isinstance(caught.value.__context__, OverflowError)


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_while_a_checkpoint_is_written_and_another_while_it_is_tidied_up_tear_nothing(
    tmp_path: Path, handler: Any, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    settings: dict[str, Any] = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 2}
    uninterrupted = quiet_trainer(tmp_path / "whole", **settings)
    uninterrupted.train()
    trainer = quiet_trainer(tmp_path / "run", **settings)
    save, rmtree = torch.save, shutil.rmtree

    def interrupted_save(*arguments: Any, **keywords: Any) -> None:
        save(*arguments, **keywords)
        if trainer.state.global_step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    def interrupted_rmtree(*arguments: Any, **keywords: Any) -> None:
        if times == 2 and trainer.state.global_step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        rmtree(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", interrupted_save)
        patch.setattr(shutil, "rmtree", interrupted_rmtree)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    resumed = quiet_trainer(tmp_path / "run", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert not (tmp_path / "run" / ".unfinished").exists()
    for name, tensor in uninterrupted.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor)
