"""Uploads in the background: in order, as often as it takes, and no more of them waiting than the disk has room for."""

from __future__ import annotations

import _thread
import logging
import shutil
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from littrainer.checkpoint import run_lock
from littrainer.hub.snapshot import SNAPSHOT_DIR, new_snapshot, remove_abandoned_snapshots
from littrainer.hub.uploads import MOST_DELETED, PushInProgress, Upload
from tests.hub.runs import files_below, pushing_trainer
from tests.hub.server import MAIN, Fault, Hub
from tests.hub.test_pushing import SAVES, below
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS

COMMIT, PREUPLOAD = "POST .*/commit/", "POST .*/preupload/"


class Sending(Upload):
    """Notes what is sent; fails where there is an error for it."""

    sent: ClassVar[list[str]] = []
    error: ClassVar[Exception | None] = None

    def send(self) -> Any:
        Sending.sent.append(str(self.message))
        if Sending.error is not None:
            raise Sending.error


@pytest.fixture
def sending(monkeypatch: pytest.MonkeyPatch) -> type[Sending]:
    monkeypatch.setattr(Sending, "sent", [])
    monkeypatch.setattr(Sending, "error", None)
    return Sending


def push_of(run: Path, step: int) -> list[Upload]:
    """Of a model and its checkpoint, which stays wanted."""
    checkpoint = run / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    place = new_snapshot(run, checkpoint.name)
    return [
        Sending("someone/run", place / "model", f"model {step}", checkpoint=checkpoint),
        Sending("someone/run", place / "all", f"checkpoint {step}", checkpoint=checkpoint, stays_wanted=True),
    ]


def set_aside(run: Path) -> list[str]:
    return sorted(folder.name.rpartition("-")[0] for folder in (run / SNAPSHOT_DIR).glob("*"))


def names(*steps: int) -> list[str]:
    return [f"checkpoint-{step}" for step in steps]


def failed_pushes(run: Path, steps: int, deletes: bool) -> PushInProgress:
    pushes = PushInProgress()
    for step in range(1, steps + 1):
        pushes.begin(push_of(run, step))
        pushes.wait_until_done()
        if deletes:
            shutil.rmtree(run / f"checkpoint-{step}")
    return pushes


def test_of_checkpoints_that_are_deleted_here_only_the_newest_wait_for_the_hub(
    sending: type[Sending], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sending.error = OSError("no way to the Hub")
    pushes = failed_pushes(tmp_path, MOST_DELETED + 3, deletes=True)
    assert set_aside(tmp_path) == names(4, 5, 6)
    told = [record.getMessage() for record in caplog.records if "is given up" in record.getMessage()]
    assert [message.partition('"')[2].partition('"')[0] for message in told] == [f"checkpoint {n}" for n in (1, 2, 3)]
    sending.error = None
    sending.sent.clear()
    pushes.finish()
    assert sending.sent == ["model 6", "checkpoint 6", "checkpoint 5", "checkpoint 4"]
    assert set_aside(tmp_path) == []


def test_a_hub_that_fails_is_not_asked_for_each_earlier_checkpoint_and_the_newest_failure_is_told_of(
    sending: type[Sending], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sending.error = OSError("cut")
    pushes = failed_pushes(tmp_path, MOST_DELETED + 3, deletes=False)
    assert sending.sent == [f"model {step}" for step in range(1, MOST_DELETED + 4)]
    assert '"model 6"' in caplog.records[-1].getMessage()
    # Checkpoints that are still there all wait.
    assert set_aside(tmp_path) == names(1, 2, 3, 4, 5, 6)
    pushes.finish()
    assert '"model 6"' in str(pushes.failure_at_end)
    assert caplog.records[-1].getMessage().startswith(f"{pushes.failure_at_end} What was saved last is in output_dir")


def test_pushes_that_are_cancelled_leave_nothing_on_the_disk(sending: type[Sending], tmp_path: Path) -> None:
    pushes, may_end = PushInProgress(), threading.Event()
    pushes.run(lambda: may_end.wait(LONGEST_WAIT_SECONDS))
    pushes.begin(push_of(tmp_path, 1))
    assert set_aside(tmp_path) == names(1)
    pushes.cancel()
    assert set_aside(tmp_path) == []
    may_end.set()
    pushes.finish()
    assert sending.sent == []


def test_snapshots_of_a_push_that_goes_on_are_left_alone_and_those_of_a_killed_run_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = new_snapshot(tmp_path, "checkpoint-2")
    (tmp_path / SNAPSHOT_DIR / "checkpoint-1-0a1b").mkdir()
    remove_abandoned_snapshots(tmp_path)
    assert [entry.name for entry in (tmp_path / SNAPSHOT_DIR).iterdir()] == [own.name]
    # As another process, which sees the lock.
    with monkeypatch.context() as patch:
        patch.setattr(run_lock, "_held", {})
        remove_abandoned_snapshots(tmp_path)
    assert [entry.name for entry in (tmp_path / SNAPSHOT_DIR).iterdir()] == [own.name]
    run_lock._forget_in_child()
    remove_abandoned_snapshots(tmp_path)
    assert not (tmp_path / SNAPSHOT_DIR).exists()


# ---- The thread ----


def test_an_interruption_ends_the_wait_and_what_is_not_done_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    work, may_end = PushInProgress(), threading.Event()

    class Interrupting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # As Ctrl-C, as soon as who sits there has been told of it.
            if record.levelno == logging.WARNING:
                _thread.interrupt_main()

    handler = Interrupting()
    logger = logging.getLogger("littrainer.hub.uploads")
    logger.addHandler(handler)
    try:
        first, second = work.run(lambda: may_end.wait(LONGEST_WAIT_SECONDS)), work.run(lambda: None)
        work.finish_before_exit(60)
        assert not first.done() and second.cancelled()
    finally:
        logger.removeHandler(handler)
        may_end.set()
    assert "and the program ends without it" in caplog.text


@pytest.mark.parametrize("blocking", [True, False])
def test_a_push_by_hand_after_a_failed_training_brings_the_checkpoints_that_were_to_stay(
    hub: Hub, tmp_path: Path, blocking: bool
) -> None:
    hub.faults.append(Fault(COMMIT, 500))
    trainer = pushing_trainer(tmp_path, hub_strategy="all_checkpoints", save_total_limit=1)
    trainer.train()
    hub.faults.clear()
    commit: Any = trainer.push_to_hub(blocking=blocking)
    assert (commit if blocking else commit.result(60)).oid == hub.repository().branches[MAIN][1].oid
    trainer.push_in_progress.wait_until_done()
    assert hub.repository().messages() == ["End of training", *(f"{save}, checkpoint" for save in reversed(SAVES))]
    assert below("checkpoint-6/", hub.repository().files()) == files_below(tmp_path / "run" / "checkpoint-6")
    assert not (tmp_path / "run" / SNAPSHOT_DIR).exists()
