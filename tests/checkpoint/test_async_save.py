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
from littrainer.checkpoint.verification import damage_in
from littrainer.checkpoint.weights import read_weights
from littrainer.checkpoint.writer import StagedCheckpoint
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import token_rows
from tests.scenarios.models import NoisyClassifier, tiny_bert_classifier
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS
from tests.scenarios.trainers import quiet_trainer

SAVING: dict[str, Any] = {"max_steps": 7, "save_strategy": "steps", "save_steps": 2}


class Gate:
    """Holds the writing thread at its first file until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.threads: list[threading.Thread] = []
        original = writer.write_weights

        def write(*arguments: Any, **keywords: Any) -> None:
            self.threads.append(threading.current_thread())
            assert self.opened.wait(LONGEST_WAIT_SECONDS)
            original(*arguments, **keywords)

        monkeypatch.setattr(writer, "write_weights", write)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


class Watcher(TrainerCallback):
    """Notes events with the step they see and the checkpoints there are; opens a gate at the end of a step."""

    def __init__(self, gate: Gate | None = None, opens_at: int = 0) -> None:
        self.gate, self.opens_at = gate, opens_at
        self.seen: list[tuple[str, int, list[str]]] = []

    def _note(self, event: str, args: Any, state: Any) -> None:
        self.seen.append((event, state.global_step, sorted(path.name for path in Path(args.output_dir).glob("ch*"))))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._note("step", args, state)
        if self.gate is not None and state.global_step == self.opens_at:
            self.gate.opened.set()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._note("save", args, state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._note("end", args, state)

    def steps_of(self, event: str) -> list[int]:
        return [step for name, step, _ in self.seen if name == event]


def make(folder: Path, *callbacks: Any, kind: type[Trainer] = Trainer, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    settings = {**SAVING, "async_save": True, **changes}
    return quiet_trainer(folder, NoisyClassifier(), kind=kind, given={"callbacks": list(callbacks)}, **settings)


def test_checkpoints_are_those_of_a_training_that_waits_and_resume_to_the_same_numbers(tmp_path: Path) -> None:
    waiting = make(tmp_path / "waiting", async_save=False)
    waiting.train()
    make(tmp_path / "background").train()
    for name in ("checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-7"):
        ours, theirs = tmp_path / "background" / name, tmp_path / "waiting" / name
        assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
        assert damage_in(ours) == []
        for file in ("model.safetensors", "trainer_state.json", "scheduler.pt"):
            assert (ours / file).read_bytes() == (theirs / file).read_bytes()
    resumed = make(tmp_path / "background")
    resumed.train(resume_from_checkpoint=str(tmp_path / "background" / "checkpoint-4"))
    for name, tensor in waiting.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor)


def test_steps_go_on_while_a_checkpoint_is_written_and_it_shows_when_it_is_complete(tmp_path: Path, gate: Gate) -> None:
    watcher = Watcher(gate, opens_at=3)
    make(tmp_path, watcher).train()
    assert ("step", 3, []) in watcher.seen
    make(tmp_path / "waiting", async_save=False).train()
    saved, expected = (read_weights(folder / "checkpoint-2") for folder in (tmp_path, tmp_path / "waiting"))
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())
    assert gate.threads[0] is not threading.main_thread()
    assert watcher.steps_of("save") == [2, 4, 6, 7] and watcher.seen[-1][0] == "end"
    # Each save is told with the state of its own step, when its folder can be looked into.
    assert all(f"checkpoint-{step}" in folders for event, step, folders in watcher.seen if event == "save")


def full_disk(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    original = StagedCheckpoint.write_deferred

    def write(files: StagedCheckpoint) -> None:
        if files.folder.name == f"checkpoint-{step}":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(files)

    monkeypatch.setattr(StagedCheckpoint, "write_deferred", write)


def test_a_failed_write_is_an_error_at_a_later_step_that_names_checkpoint_and_cause(
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
    # An older one is deleted when the new one is complete.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", RUN_RECORD_NAME]
    assert trainer.session.checkpoints.pending is None and not trainer.is_in_train
    monkeypatch.undo()
    assert trainer.train().global_step == 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-20", RUN_RECORD_NAME]


def test_a_write_that_fails_beside_another_error_is_logged(
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
    assert damage_in(tmp_path / "checkpoint-2") == []
    assert make(tmp_path).train(resume_from_checkpoint=True).global_step == 7


def test_a_signal_to_stop_waits_for_the_checkpoint_on_its_way_and_for_its_own(tmp_path: Path, gate: Gate) -> None:
    class Stopping(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                threading.Timer(0.3, gate.opened.set).start()
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = make(tmp_path, Stopping(), enable_jit_checkpoint=True)
    assert trainer.train().global_step == 3
    assert [damage_in(tmp_path / f"checkpoint-{step}") for step in (2, 3)] == [[], []]


def test_what_a_callback_asks_for_when_it_is_told_of_a_save_is_done(tmp_path: Path) -> None:
    class StopAtFirstSave(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = True

    assert make(tmp_path, StopAtFirstSave(), max_steps=50, num_train_epochs=50).train().global_step < 50


def test_the_best_model_is_loaded_from_a_checkpoint_that_is_complete(tmp_path: Path) -> None:
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


def test_a_save_by_hand_waits_for_the_one_in_the_background_and_is_there_at_once(tmp_path: Path, gate: Gate) -> None:
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
def test_a_subclass_that_writes_by_itself_does_so_on_the_main_thread_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    threads: list[threading.Thread] = []

    def own(self: Any, *arguments: Any, **keywords: Any) -> Any:
        threads.append(threading.current_thread())
        return getattr(super(kind, self), method)(*arguments, **keywords)

    kind: Any = type("OwnTrainer", (Trainer,), {method: own})
    watcher = Watcher()
    make(tmp_path, watcher, kind=kind).train()
    assert threads == [threading.main_thread()] * 4
    warnings = [record.getMessage() for record in caplog.records if "async_save" in record.getMessage()]
    assert len(warnings) == 1 and "OwnTrainer" in warnings[0] and method in warnings[0]
    assert ("save", 2, ["checkpoint-2"]) in watcher.seen


def test_what_cannot_be_copied_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    storage: Any = SimpleNamespace(can_be_copied=False)
    saves = CheckpointManager()
    saves.is_async = True
    assert [saves.can_copy(storage), saves.can_copy(storage)] == [False, False]
    (told,) = caplog.messages
    assert "version 1 of FSDP" in told and "training waits" in told


class OwnWriter(BertForSequenceClassification):
    """Writes its weights itself, whatever it is given."""

    def save_pretrained(self, save_directory: Any, **_: Any) -> None:  # type: ignore[override]
        Path(save_directory, "thread.txt").write_text(threading.current_thread().name)
        super().save_pretrained(save_directory)


def test_a_model_with_its_own_way_of_saving_is_asked_before_training_goes_on(tmp_path: Path) -> None:
    model = OwnWriter(tiny_bert_classifier().config)
    given = {"train_dataset": token_rows(8), "data_collator": pad_tokens}
    quiet_trainer(tmp_path, model, given=given, max_steps=2, async_save=True, save_strategy="steps").train()
    assert (tmp_path / "checkpoint-2" / "thread.txt").read_text() == threading.main_thread().name
    assert damage_in(tmp_path / "checkpoint-2") == []


def test_what_shares_memory_shares_it_in_the_copy_too() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    states = {"one": whole, "tied": whole, "column": whole[:, 1], "turned": whole.t(), "other": whole.clone()}
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
    whole.zero_()
    assert copied["column"].tolist() == [1.0, 5.0, 9.0]


def test_a_tensor_that_has_its_memory_to_itself_is_copied_by_one_operation() -> None:
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
    assert all(torch.equal(one, other) for one, other in zip(copied, states, strict=True))


def test_memory_that_was_given_back_is_used_for_the_next_copy_and_no_other_is() -> None:
    copies = HostCopies()
    states = [torch.ones(1000), torch.ones(500)]
    first = copies.copy(states)
    second = copies.copy(states)
    places = [{tensor.data_ptr() for tensor in copied} for copied in (first, second)]
    assert not places[0] & places[1]
    copies.release()
    third = copies.copy([torch.zeros(500), torch.zeros(1000)])
    assert {tensor.data_ptr() for tensor in third} <= places[0] | places[1]
    assert all(tensor.sum() == 0 for tensor in third)
