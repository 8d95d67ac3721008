from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from littrainer.checkpoint import manager, store
from littrainer.checkpoint.layout import RUN_RECORD_NAME
from littrainer.checkpoint.store import LOCK_NAME, is_abandoned, open_store
from tests.scenarios.other_processes import MAX_WAIT_SECONDS
from tests.scenarios.trainers import quiet_trainer

HOLD = """
import sys, pathlib
from littrainer.checkpoint.store import open_store
with open_store(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other_run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that locks `tmp_path`."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_locked_folder_is_refused_until_its_run_is_dead(tmp_path: Path, other_run: subprocess.Popen[str]) -> None:
    (tmp_path / ".unfinished" / "checkpoint-4").mkdir(parents=True)
    with pytest.raises(RuntimeError, match=rf"process {other_run.pid} on .*{tmp_path}.*another output_dir"):
        quiet_trainer(tmp_path, max_steps=1, save_strategy="steps").train()
    assert (tmp_path / ".unfinished" / "checkpoint-4").is_dir(), "what the other run writes is left alone"
    quiet_trainer(tmp_path, max_steps=1, save_strategy="no").train()

    os.kill(other_run.pid, signal.SIGKILL)
    other_run.wait(MAX_WAIT_SECONDS)
    assert (tmp_path / LOCK_NAME).exists()
    trainer = quiet_trainer(tmp_path, max_steps=1, save_strategy="steps")
    trainer.train()
    assert set(os.listdir(tmp_path)) == {"checkpoint-1", RUN_RECORD_NAME}, "what the dead run left is gone"


def test_a_refused_start_leaves_the_other_runs_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(folder: Path) -> None:
        (folder / RUN_RECORD_NAME).write_text("the other run's")
        raise RuntimeError("another run")

    monkeypatch.setattr(manager, "open_store", refused)
    with pytest.raises(RuntimeError, match="another run"):
        quiet_trainer(tmp_path, max_steps=1, save_strategy="steps").train()
    assert (tmp_path / RUN_RECORD_NAME).read_text() == "the other run's"


def test_consecutive_nested_and_subfolder_trainings_are_accepted(tmp_path: Path) -> None:
    for _ in range(2):
        with open_store(tmp_path):
            with open_store(tmp_path), open_store(tmp_path / "run-1"):
                assert {path.name for path in tmp_path.iterdir()} == {LOCK_NAME, "run-1"}
            assert f"process {os.getpid()} on " in (tmp_path / LOCK_NAME).read_text()
        assert os.listdir(tmp_path) == ["run-1"]


def _wait(connection: Any) -> None:
    connection.send(store._locked_stores)
    connection.recv()


def test_a_forked_worker_does_not_hold_the_lock(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    with open_store(tmp_path):
        worker = context.Process(target=_wait, args=(theirs,))
        worker.start()
        assert ours.recv() == {}
    # A killed run does not delete the file, and the lock ends when no process has it open.
    (tmp_path / LOCK_NAME).touch()
    with open_store(tmp_path):
        pass
    ours.send(None)
    worker.join(MAX_WAIT_SECONDS)


def test_a_forked_child_leaves_lock_and_deletions_to_its_parent(tmp_path: Path) -> None:
    lock = open_store(tmp_path)
    lock.__enter__()._deletions.append(deletion := Future())
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            lock.__exit__(None, None, None)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / LOCK_NAME).is_file()
    deletion.set_result(None)
    lock.__exit__(None, None, None)
    assert not (tmp_path / LOCK_NAME).exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS])
def test_a_file_system_without_locks_refuses_nothing_and_cleans_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(descriptor: int, operation: int) -> None:
        raise OSError(number, "no locks here")

    monkeypatch.setattr(store.fcntl, "flock", fail)
    (tmp_path / ".unfinished" / "checkpoint-4").mkdir(parents=True)
    with open_store(tmp_path):
        # Another run may be alive.
        assert (tmp_path / ".unfinished" / "checkpoint-4").is_dir()
    (tmp_path / LOCK_NAME).touch()
    assert not is_abandoned(tmp_path)


def test_an_unwritable_folder_is_an_error_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.open

    def refuse(path: Any, flags: int, *rest: Any, **keywords: Any) -> int:
        if Path(path).name == LOCK_NAME:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return original(path, flags, *rest, **keywords)

    monkeypatch.setattr(os, "open", refuse)
    trainer = quiet_trainer(tmp_path, max_steps=1, save_strategy="steps")
    with pytest.raises(OSError, match=r"No checkpoint can be written to .*Read-only.*save_strategy='no'"):
        trainer.train()
    assert trainer.state.global_step == 0 and not trainer.is_in_train
    quiet_trainer(tmp_path, max_steps=1, save_strategy="no").train()


@pytest.mark.parametrize(
    ("name", "is_refused"), [(".unfinished/x", True), ("checkpoint-2", True), ("checkpoint-9", False)]
)
def test_another_users_checkpoint_folder_is_an_error_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_refused: bool
) -> None:
    (tmp_path / name).mkdir(parents=True)
    foreign = tmp_path / name.split("/")[0]
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != foreign and access(path, mode))
    trainer = quiet_trainer(tmp_path, max_steps=3, save_strategy="steps", save_steps=2)
    if is_refused:
        with pytest.raises(OSError, match=f"No checkpoint can be written to .*{foreign.name} in it is another user's"):
            trainer.train()
    else:
        trainer.train()
    assert trainer.state.global_step == (0 if is_refused else 3)


def test_the_lock_is_released_after_a_training_or_its_error(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    with pytest.raises(ValueError, match="no intact"):
        trainer.train(resume_from_checkpoint=True)
    assert os.listdir(tmp_path) == []
    trainer.train()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1", "checkpoint-2", RUN_RECORD_NAME]
    record = (tmp_path / RUN_RECORD_NAME).read_bytes()
    with pytest.raises(ValueError, match="no such folder"):
        quiet_trainer(tmp_path, max_steps=3, save_strategy="steps").train(resume_from_checkpoint=str(tmp_path / "none"))
    assert (tmp_path / RUN_RECORD_NAME).read_bytes() == record, "what the run before noted stays"


def test_a_link_named_like_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / LOCK_NAME).symlink_to("mine.txt")
    with pytest.raises(OSError, match="No checkpoint can be written"), open_store(tmp_path):
        pass
    assert (tmp_path / "mine.txt").read_text() == "mine"
