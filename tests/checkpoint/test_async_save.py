from __future__ import annotations

import errno
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertForSequenceClassification

from littrainer import Trainer, TrainerCallback
from littrainer.checkpoint import writer
from littrainer.checkpoint.host_copies import HostCopies
from littrainer.checkpoint.layout import RUN_RECORD_NAME
from littrainer.checkpoint.manager import BackgroundSaveError, CheckpointManager
from littrainer.checkpoint.verification import find_damage
from littrainer.checkpoint.weights import read_weights
from littrainer.checkpoint.writer import CheckpointWriter
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import token_rows
from tests.scenarios.models import NoisyClassifier, tiny_bert_classifier
from tests.scenarios.other_processes import MAX_WAIT_SECONDS
from tests.scenarios.trainers import quiet_trainer

SAVING: dict[str, Any] = {"max_steps": 7, "save_strategy": "steps", "save_steps": 2}


class Gate:
    """A gate that blocks the writing thread at its first file until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.threads: list[threading.Thread] = []
        original = writer.write_weights

        def write(*arguments: Any, **keywords: Any) -> None:
            self.threads.append(threading.current_thread())
            assert self.opened.wait(MAX_WAIT_SECONDS)
            original(*arguments, **keywords)

        monkeypatch.setattr(writer, "write_weights", write)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


class Watcher(TrainerCallback):
    """A recorder of events with step and checkpoints, which opens a gate at the end of a step."""

    def __init__(self, gate: Gate | None = None, opens_at: int = 0) -> None:
        self.gate, self.opens_at = gate, opens_at
        self.events: list[tuple[str, int, list[str]]] = []

    def _record(self, event: str, args: Any, state: Any) -> None:
        self.events.append((event, state.global_step, sorted(path.name for path in Path(args.output_dir).glob("ch*"))))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._record("step", args, state)
        if self.gate is not None and state.global_step == self.opens_at:
            self.gate.opened.set()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._record("save", args, state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._record("end", args, state)

    def steps_of(self, event: str) -> list[int]:
        return [step for name, step, _ in self.events if name == event]


def make(folder: Path, *callbacks: Any, kind: type[Trainer] = Trainer, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    settings = {**SAVING, "async_save": True, **changes}
    return quiet_trainer(
        folder, NoisyClassifier(), kind=kind, trainer_kwargs={"callbacks": list(callbacks)}, **settings
    )


def test_background_checkpoints_equal_synchronous_checkpoints_and_resume_exactly(tmp_path: Path) -> None:
    waiting = make(tmp_path / "waiting", async_save=False)
    waiting.train()
    make(tmp_path / "background").train()
    for name in ("checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-7"):
        ours, theirs = tmp_path / "background" / name, tmp_path / "waiting" / name
        assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
        assert find_damage(ours) == []
        for file in ("model.safetensors", "trainer_state.json", "scheduler.pt"):
            assert (ours / file).read_bytes() == (theirs / file).read_bytes()
    resumed = make(tmp_path / "background")
    resumed.train(resume_from_checkpoint=str(tmp_path / "background" / "checkpoint-4"))
    for name, tensor in waiting.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor)


def test_steps_go_on_while_a_checkpoint_is_written_and_it_shows_when_it_is_complete(tmp_path: Path, gate: Gate) -> None:
    watcher = Watcher(gate, opens_at=3)
    make(tmp_path, watcher).train()
    assert ("step", 3, []) in watcher.events
    make(tmp_path / "waiting", async_save=False).train()
    saved, expected = (read_weights(folder / "checkpoint-2") for folder in (tmp_path, tmp_path / "waiting"))
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())
    assert gate.threads[0] is not threading.main_thread()
    assert watcher.steps_of("save") == [2, 4, 6, 7] and watcher.events[-1][0] == "end"
    # on_save sees the state of the saved step, when the folder exists.
    assert all(f"checkpoint-{step}" in folders for event, step, folders in watcher.events if event == "save")


def full_disk(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    original = CheckpointWriter.write_deferred

    def write(files: CheckpointWriter) -> None:
        if files.folder.name == f"checkpoint-{step}":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(files)

    monkeypatch.setattr(CheckpointWriter, "write_deferred", write)


def test_a_failed_write_is_an_error_at_a_later_step_with_checkpoint_and_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Patient(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            for thread in threading.enumerate():
                if thread.name.startswith("saving checkpoint-8") and state.global_step > 8:
                    thread.join()

    full_disk(monkeypatch, 8)
    trainer = make(tmp_path, Patient(), max_steps=20, save_steps=4, save_total_limit=1)
    with pytest.raises(BackgroundSaveError, match=r"checkpoint-8.*No space left") as caught:
        trainer.train()
    assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.ENOSPC
    assert trainer.state.global_step in (9, 10)
    # The older checkpoint is deleted when the next checkpoint is complete.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", RUN_RECORD_NAME]
    assert trainer.session.checkpoints.pending is None and not trainer.is_in_train
    monkeypatch.undo()
    assert trainer.train().global_step == 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-20", RUN_RECORD_NAME]


def test_a_failed_write_during_another_error_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gate: Gate
) -> None:
    class Failing(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                gate.opened.set()
                raise OverflowError("of the callback")

    full_disk(monkeypatch, 2)
    with caplog.at_level(logging.ERROR), pytest.raises(OverflowError, match="of the callback"):
        make(tmp_path, Failing()).train()
    assert "checkpoint-2 could not be written in the background" in caplog.text


def test_if_training_ends_by_ctrl_c_the_pending_checkpoint_is_finished(tmp_path: Path, gate: Gate) -> None:
    class Ending(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                threading.Timer(0.3, gate.opened.set).start()
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, Ending()).train()
    assert find_damage(tmp_path / "checkpoint-2") == []
    assert make(tmp_path).train(resume_from_checkpoint=True).global_step == 7


def test_a_stop_signal_waits_for_the_pending_checkpoint_and_saves_another(tmp_path: Path, gate: Gate) -> None:
    class Stopping(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                threading.Timer(0.3, gate.opened.set).start()
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = make(tmp_path, Stopping(), enable_jit_checkpoint=True)
    assert trainer.train().global_step == 3
    assert [find_damage(tmp_path / f"checkpoint-{step}") for step in (2, 3)] == [[], []]


def test_control_flags_that_on_save_sets_take_effect(tmp_path: Path) -> None:
    class StopAtFirstSave(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = True

    assert make(tmp_path, StopAtFirstSave(), max_steps=50, num_train_epochs=50).train().global_step < 50


def test_the_best_model_is_loaded_from_a_complete_checkpoint(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "learning_rate": 0.3,
    }
    trainers = []
    for flag in (False, True):
        trainers.append(make(tmp_path / str(flag), async_save=flag, **settings))
        trainers[-1].train()
    waiting, ours = trainers
    assert ours.state.best_global_step == waiting.state.best_global_step
    assert ours.state.best_model_checkpoint == str(tmp_path / "True" / f"checkpoint-{ours.state.best_global_step}")
    for name, tensor in waiting.model.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name], tensor)


def test_a_manual_save_waits_for_the_background_save_and_is_synchronous(tmp_path: Path, gate: Gate) -> None:
    folders: list[list[str]] = []

    class ByHand(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                threading.Timer(0.3, gate.opened.set).start()
                trainer._save_checkpoint(trainer.model, trial=None)
                folders.append(sorted(path.name for path in tmp_path.glob("ch*")))

    trainer = make(tmp_path, ByHand(), max_steps=5)
    trainer.train()
    assert folders == [["checkpoint-2", "checkpoint-3"]]


@pytest.mark.parametrize("method", ["_save", "save_model", "_save_checkpoint"])
def test_an_overridden_save_method_runs_on_the_main_thread_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    threads: list[threading.Thread] = []

    def save(self: Trainer, *arguments: Any, **keywords: Any) -> Any:
        threads.append(threading.current_thread())
        return getattr(super(kind, self), method)(*arguments, **keywords)

    kind: Any = type("CustomTrainer", (Trainer,), {method: save})
    watcher = Watcher()
    make(tmp_path, watcher, kind=kind).train()
    assert threads == [threading.main_thread()] * 4
    warnings = [record.getMessage() for record in caplog.records if "async_save" in record.getMessage()]
    assert len(warnings) == 1 and "CustomTrainer" in warnings[0] and method in warnings[0]
    assert ("save", 2, ["checkpoint-2"]) in watcher.events


def test_models_that_cannot_be_copied_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    storage: Any = SimpleNamespace(supports_async_save=False)
    saves = CheckpointManager()
    saves.is_async = True
    assert [saves.can_save_async(storage), saves.can_save_async(storage)] == [False, False]
    (warning,) = caplog.messages
    assert "version 1 of FSDP" in warning and "training waits" in warning


class CustomWriter(BertForSequenceClassification):
    """A model that overrides `save_pretrained`."""

    def save_pretrained(self, save_directory: Any, **_: Any) -> None:  # type: ignore[override]
        Path(save_directory, "thread.txt").write_text(threading.current_thread().name)
        super().save_pretrained(save_directory)


def test_an_overridden_save_pretrained_runs_on_the_main_thread(tmp_path: Path) -> None:
    model = CustomWriter(tiny_bert_classifier().config)
    options = {"train_dataset": token_rows(8), "data_collator": pad_tokens}
    quiet_trainer(tmp_path, model, trainer_kwargs=options, max_steps=2, async_save=True, save_strategy="steps").train()
    assert (tmp_path / "checkpoint-2" / "thread.txt").read_text() == threading.main_thread().name
    assert find_damage(tmp_path / "checkpoint-2") == []


def test_copies_share_memory_like_the_originals() -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    states = {"one": matrix, "tied": matrix, "column": matrix[:, 1], "turned": matrix.t(), "other": matrix.clone()}
    kinds = {
        "no elements": torch.empty(0, 3),
        "a number": torch.tensor(2.5, dtype=torch.bfloat16),
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "complex, conjugated": torch.tensor([1 + 2j]).conj(),
        "offset": torch.arange(10)[7:],
    }
    copied = HostCopies().copy({**states, **kinds, "sparse": torch.eye(3).to_sparse()})
    assert copied["sparse"].is_sparse and torch.equal(copied["sparse"].to_dense(), torch.eye(3))
    for name, tensor in kinds.items():
        assert copied[name].dtype == tensor.dtype and torch.equal(copied[name], tensor), name
    for name, tensor in states.items():
        assert torch.equal(copied[name], tensor) and copied[name].stride() == tensor.stride()
    memory = {name: copied[name].untyped_storage().data_ptr() for name in states}
    assert memory["one"] == memory["tied"] == memory["column"] == memory["turned"] != memory["other"]
    matrix.zero_()
    assert copied["column"].tolist() == [1.0, 5.0, 9.0]


def test_an_unshared_tensor_is_copied_by_one_operation() -> None:
    class Operations(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    copies, states = HostCopies(), [torch.ones(3, 4), torch.tensor(5), torch.ones(4)[:4]]
    copies.copy(states)
    copies.release()
    with Operations() as operations:
        copied = copies.copy(states)
    assert operations.names == ["aten.copy_.default"] * len(states)
    assert all(map(torch.equal, copied, states))


def test_only_released_buffers_are_reused() -> None:
    copies = HostCopies()
    states = [torch.ones(1000), torch.ones(500)]
    first = copies.copy(states)
    second = copies.copy(states)
    addresses = [{tensor.data_ptr() for tensor in copied} for copied in (first, second)]
    assert not addresses[0] & addresses[1]
    copies.release()
    third = copies.copy([torch.zeros(500), torch.zeros(1000)])
    assert {tensor.data_ptr() for tensor in third} <= addresses[0] | addresses[1]
    assert all(tensor.sum() == 0 for tensor in third)
