"""Preemption signals with `enable_jit_checkpoint`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import Trainer, TrainerCallback, TrainingArguments
from tests.faults.failing import Fuse, fail_in_event
from tests.faults.signals import SignalIn
from tests.scenarios.models import NoisyClassifier
from tests.scenarios.other_processes import MAX_WAIT_SECONDS
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

# Three steps per epoch, an evaluation after every second step, and dropout.
SETTINGS: dict[str, Any] = {
    "max_steps": 7,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "logging_strategy": "steps",
    "logging_steps": 1,
}
BATCHES_PER_EVALUATION = 3


class Recorder(TrainerCallback):
    """A recorder of events and steps."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("step", state.global_step))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("batch", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("save", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("end", state.global_step))


@pytest.fixture(autouse=True)
def calls() -> Iterator[list[int]]:
    """Signals that reach the handlers from before training."""
    received: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in numbers}
    yield received
    for number, handler in before.items():
        signal.signal(number, handler)


def make(folder: Path, *callbacks: Any, kind: type[Trainer] = Trainer, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    return quiet_trainer(
        folder,
        NoisyClassifier(),
        kind=kind,
        trainer_kwargs={"callbacks": list(callbacks)},
        **{**SETTINGS, "enable_jit_checkpoint": True, **changes},
    )


def numbers(trainer: Trainer) -> list[dict[str, Any]]:
    """Return the logs without times."""
    clock = ("runtime", "per_second", "time")
    logs = [{k: v for k, v in log.items() if not k.endswith(clock)} for log in trainer.state.log_history]
    return [log for log in logs if "train_loss" not in log]


def check_same_training(resumed: Trainer, uninterrupted: Trainer) -> None:
    assert numbers(resumed) == numbers(uninterrupted)
    for name, tensor in uninterrupted.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor)


MOMENTS: dict[str, tuple[str, int, int]] = {
    # event, its step, the saved step
    "between two steps": ("on_step_begin", 2, 3),
    "in the middle of an update": ("on_optimizer_step", 4, 5),
    "at the end of a step": ("on_step_end", 3, 3),
    "at a step before an evaluation": ("on_step_end", 4, 4),
    "in an evaluation": ("on_prediction_step", 4, 4),
    "in an evaluation at the end of an epoch": ("on_prediction_step", 6, 6),
    "in a log": ("on_log", 5, 6),
    "at the end of an epoch": ("on_epoch_end", 3, 3),
}


@pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer])
@pytest.mark.parametrize("place", MOMENTS)
def test_training_stops_with_a_checkpoint_that_resumes_exactly(tmp_path: Path, place: str, kind: type[Trainer]) -> None:
    event, step, saved = MOMENTS[place]
    uninterrupted = make(tmp_path / "whole", kind=kind)
    uninterrupted.train()
    recorder = Recorder()
    stopped = make(tmp_path / "stopped", SignalIn(event, step), recorder, kind=kind)
    assert stopped.train().global_step == saved
    assert stopped.preemption.stop_signal == signal.SIGTERM
    assert [path.name for path in (tmp_path / "stopped").glob("checkpoint-*")] == [f"checkpoint-{saved}"]
    assert recorder.events.count(("save", saved)) == 1 and recorder.events[-1] == ("end", saved)
    resumed = make(tmp_path / "stopped", kind=kind)
    resumed.train(resume_from_checkpoint=True)
    check_same_training(resumed, uninterrupted)
    assert resumed.preemption.stop_signal is None


EACH_EPOCH: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
EACH_SECOND_STEP: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}


@pytest.mark.parametrize(
    ("event", "step", "settings"),
    [
        ("on_step_end", 3, EACH_EPOCH),
        ("on_prediction_step", 3, EACH_EPOCH),
        ("on_step_begin", 3, EACH_EPOCH),
        ("on_prediction_step", 4, EACH_SECOND_STEP),
        ("on_step_end", 4, EACH_SECOND_STEP),
    ],
)
def test_pending_evaluations_are_rerun_and_the_best_is_recorded(
    tmp_path: Path, event: str, step: int, settings: dict[str, Any]
) -> None:
    uninterrupted = make(tmp_path / "whole", **settings)
    uninterrupted.train()
    make(tmp_path / "stopped", SignalIn(event, step), **settings).train()
    resumed = make(tmp_path / "stopped", **settings)
    resumed.train(resume_from_checkpoint=True)
    check_same_training(resumed, uninterrupted)
    assert resumed.state.best_metric == uninterrupted.state.best_metric
    assert resumed.state.best_global_step == uninterrupted.state.best_global_step


def test_a_signal_after_the_last_step_is_recorded(tmp_path: Path) -> None:
    trainer = make(tmp_path, SignalIn("on_train_end", 7))
    assert trainer.train().global_step == 7
    assert trainer.preemption.stop_signal == signal.SIGTERM


def test_an_evaluation_is_interrupted_and_rerun(tmp_path: Path) -> None:
    recorder = Recorder()
    stopped = make(tmp_path, recorder, SignalIn("on_prediction_step", 4))
    stopped.train()
    assert recorder.events.count(("batch", 2)) == BATCHES_PER_EVALUATION and recorder.events.count(("batch", 4)) == 1
    assert not any("eval_loss" in log for log in stopped.state.log_history if log["step"] == 4)
    again = Recorder()
    resumed = make(tmp_path, again)
    resumed.train(resume_from_checkpoint=True)
    assert again.events[:BATCHES_PER_EVALUATION] == [("batch", 4)] * BATCHES_PER_EVALUATION
    assert again.events[BATCHES_PER_EVALUATION] == ("step", 5)


def test_a_step_that_has_just_been_saved_is_not_saved_again(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = make(tmp_path, recorder, SignalIn("on_step_end", 2), save_strategy="steps", save_steps=2)
    trainer.train()
    assert [entry for entry in recorder.events if entry[0] == "save"] == [("save", 2)]


def test_a_signal_during_a_save_lets_it_finish_and_stops_after_the_next_step(tmp_path: Path) -> None:
    class SignallingTrainer(Trainer):
        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            super().save_model(output_dir, _internal_call)

    trainer = make(tmp_path, kind=SignallingTrainer, save_strategy="steps", save_steps=2)
    assert trainer.train().global_step == 3
    names = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert names == ["checkpoint-2", "checkpoint-3"]


@pytest.mark.parametrize("event", ["on_train_begin", "on_prediction_step"])
def test_a_signal_before_the_first_step_does_what_it_did_before_training(
    tmp_path: Path, calls: list[int], event: str
) -> None:
    trainer = make(tmp_path, SignalIn(event, 0), eval_on_start=True)
    assert trainer.train().global_step == 7
    assert calls and not list(tmp_path.glob("checkpoint-*"))


def test_a_last_evaluation_that_a_signal_interrupts_is_made_by_the_resumed_training(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"eval_strategy": "no", "eval_at_end": True}
    settings |= {"save_strategy": "steps", "metric_for_best_model": "loss"}
    uninterrupted = make(tmp_path / "whole", **settings)
    uninterrupted.train()
    stopped = make(tmp_path / "stopped", SignalIn("on_prediction_step", 7), **settings)
    stopped.train()
    assert not any("eval_loss" in entry for entry in stopped.state.log_history)
    resumed = make(tmp_path / "stopped", **settings)
    resumed.train(resume_from_checkpoint=True)
    check_same_training(resumed, uninterrupted)
    assert resumed.state.best_global_step == 7


def test_several_signals_save_once_and_each_reaches_the_scripts_handler(tmp_path: Path, calls: list[int]) -> None:
    recorder = Recorder()
    handler = signal.getsignal(signal.SIGTERM)
    make(tmp_path, recorder, SignalIn("on_step_begin", 2, times=3)).train()
    assert calls == [signal.SIGTERM] * 3
    assert [entry for entry in recorder.events if entry[0] == "save"] == [("save", 3)]
    assert signal.getsignal(signal.SIGTERM) is handler


def test_handlers_are_restored_unless_the_script_sets_another(
    tmp_path: Path,
) -> None:
    def later(*_: Any) -> None: ...

    class Setting(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            signal.signal(signal.SIGTERM, later)

    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(OverflowError):
        fail_in_event("on_step_end")(tmp_path, Fuse(OverflowError()), enable_jit_checkpoint=True).train()
    assert signal.getsignal(signal.SIGTERM) is handler
    make(tmp_path, Setting()).train()
    assert signal.getsignal(signal.SIGTERM) is later


@pytest.mark.parametrize(
    ("trainer_kwargs", "sent", "stops"),
    [
        (None, signal.SIGUSR1, False),
        ("SIGUSR1", signal.SIGUSR1, True),
        ("SIGUSR1", signal.SIGTERM, False),
        (["SIGTERM", "SIGUSR1"], signal.SIGUSR1, True),
    ],
)
def test_jit_checkpoint_signals_says_which_signals_save(
    tmp_path: Path, trainer_kwargs: Any, sent: int, stops: bool
) -> None:
    trainer = make(tmp_path, SignalIn("on_step_end", 2, sent), jit_checkpoint_signals=trainer_kwargs)
    assert trainer.train().global_step == (2 if stops else 7)
    assert (trainer.preemption.stop_signal == sent) is stops


def test_without_enable_jit_checkpoint_signals_do_what_they_did_before_training(
    tmp_path: Path, calls: list[int]
) -> None:
    trainer = make(tmp_path, SignalIn("on_step_end", 2), enable_jit_checkpoint=False)
    assert trainer.train().global_step == 7
    assert calls == [signal.SIGTERM] and not list(tmp_path.glob("checkpoint-*"))


def test_ctrl_c_can_be_a_save_signal_and_interrupts_if_sent_twice(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"jit_checkpoint_signals": "SIGINT"}
    assert make(tmp_path / "once", SignalIn("on_step_end", 2, signal.SIGINT), **settings).train().global_step == 2
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "twice", SignalIn("on_step_begin", 2, signal.SIGINT, times=2), **settings).train()


def test_jit_checkpoint_signals_enables_the_feature_and_refuses_unknown_signals(tmp_path: Path) -> None:
    assert TrainingArguments(str(tmp_path), jit_checkpoint_signals="SIGUSR1").enable_jit_checkpoint
    with pytest.raises(ValueError, match="SIGUSR1"):
        TrainingArguments(str(tmp_path), enable_jit_checkpoint=True, jit_checkpoint_signals="SIGUSR")


def test_training_in_another_thread_is_refused_with_the_reason(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def train() -> None:
        try:
            make(tmp_path).train()
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(MAX_WAIT_SECONDS)
    assert "main thread" in str(errors[0])


def test_lightning_on_a_cluster_handles_no_signal_and_writes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As under `srun --ntasks=1`, where Lightning would requeue the job on SIGUSR1.
    numbers = {"JOB_ID": 1, "NTASKS": 1, "NTASKS_PER_NODE": 1, "PROCID": 0, "LOCALID": 0, "NODEID": 0}
    for name, value in {**numbers, "JOB_NAME": "train", "JOB_NODELIST": "node1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    handlers: list[Any] = []

    class Looking(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            handlers.append([signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)])

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    trainer = make(tmp_path, Looking(), enable_jit_checkpoint=False, max_steps=2)
    trainer.train()
    assert handlers == [before] * 2
    stopped = make(tmp_path, SignalIn("on_step_end", 2, signal.SIGUSR1), jit_checkpoint_signals="SIGUSR1")
    assert stopped.train().global_step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "littrainer_run.json"]
