"""Uploads in the background: in order, as often as it takes, and no more of them waiting than the disk has room for."""

from __future__ import annotations

import _thread
import functools
import gc
import logging
import os
import shutil
import threading
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, ClassVar

import pytest

from littrainer import TrainerCallback
from littrainer.checkpoint import run_lock
from littrainer.hub.snapshot import SNAPSHOT_DIR, new_snapshot, remove_abandoned_snapshots
from littrainer.hub.uploads import MOST_DELETED, Push, PushInProgress, Upload
from tests.hub.runs import AtEnd, AtStep, files_below, pushing_trainer
from tests.hub.server import MAIN, Fault, Hub
from tests.hub.test_pushing import SAVES, WITH_CHECKPOINTS, below
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS

COMMIT, PREUPLOAD = "POST .*/commit/", "POST .*/preupload/"


class Refused(Exception):
    """An answer of the Hub that the next upload would get as well."""

    class response:
        status_code = 403


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


def push_of(run: Path, step: int) -> Push:
    """Of a model and its checkpoint, which stays wanted."""
    checkpoint = run / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    place = new_snapshot(run, checkpoint.name)
    return Push(
        [
            Sending("someone/run", place / "model", f"model {step}", checkpoint=checkpoint),
            Sending("someone/run", place / "all", f"checkpoint {step}", checkpoint=checkpoint, stays_wanted=True),
        ]
    )


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


def test_checkpoints_that_are_still_there_all_wait_for_the_hub(sending: type[Sending], tmp_path: Path) -> None:
    sending.error = OSError("no way to the Hub")
    pushes = failed_pushes(tmp_path, MOST_DELETED + 3, deletes=False)
    assert set_aside(tmp_path) == names(1, 2, 3, 4, 5, 6)
    del pushes


@pytest.mark.parametrize(
    ("error", "tried"),
    [
        (Refused(), ["model 1", "model 2", "model 3"]),
        (OSError("cut"), [f"{kind} {step}" for step in (1, 2, 3) for kind in ("model", "checkpoint")]),
    ],
    ids=["refused", "cut"],
)
def test_a_hub_that_fails_is_not_asked_again_for_each_earlier_checkpoint(
    sending: type[Sending], tmp_path: Path, error: Exception, tried: list[str]
) -> None:
    sending.error = error
    failed_pushes(tmp_path, 3, deletes=False)
    assert sending.sent == tried


def test_the_failure_that_is_told_of_is_that_of_the_newest_save(
    sending: type[Sending], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sending.error = OSError("cut")
    pushes = failed_pushes(tmp_path, 3, deletes=False)
    assert '"model 3"' in caplog.records[-1].getMessage()
    pushes.finish()
    assert '"model 3"' in str(pushes.failure_at_end)
    assert caplog.records[-1].getMessage().startswith(f"{pushes.failure_at_end} What was saved last is in output_dir")


def test_of_saves_that_queue_for_a_slow_hub_the_oldest_are_given_up_where_they_would_fill_the_disk(
    sending: type[Sending], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pushes, has_begun, may_end = PushInProgress(), threading.Event(), threading.Event()

    def wait() -> None:
        has_begun.set()
        may_end.wait(LONGEST_WAIT_SECONDS)

    pushes.run(wait)
    assert has_begun.wait(LONGEST_WAIT_SECONDS)
    for step in range(1, MOST_DELETED + 3):
        pushes.begin(push_of(tmp_path, step))
        if step != 2:
            shutil.rmtree(tmp_path / f"checkpoint-{step}")
    # Of the second one nothing is deleted, so that what waits takes no room.
    assert set_aside(tmp_path) == names(2, 3, 4, 5)
    assert [record.levelno for record in caplog.records if "is given up" in record.getMessage()] == [logging.WARNING]
    may_end.set()
    pushes.finish()
    assert sending.sent == [f"{kind} {step}" for step in (2, 3, 4, 5) for kind in ("model", "checkpoint")]


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


def test_what_nobody_can_send_any_more_is_removed(sending: type[Sending], tmp_path: Path) -> None:
    sending.error = Refused()
    pushes = failed_pushes(tmp_path, 1, deletes=True)
    pushes.finish()
    # The checkpoint waits for a push by hand.
    assert set_aside(tmp_path) == names(1)
    sending.error = None
    del pushes
    gc.collect()
    assert set_aside(tmp_path) == []


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


def test_a_link_where_pushes_are_set_aside_is_refused_before_training_and_not_followed(
    hub: Hub, tmp_path: Path
) -> None:
    trainer = pushing_trainer(tmp_path)
    (tmp_path / "elsewhere" / "thesis").mkdir(parents=True)
    (tmp_path / "run" / SNAPSHOT_DIR).symlink_to("../elsewhere")
    for use in (trainer.train, lambda: trainer.push_to_hub(blocking=False)):
        with pytest.raises(OSError, match=rf"is a link to \.\./elsewhere.*{SNAPSHOT_DIR}"):
            use()
        assert trainer.state.global_step == 0
        assert list((tmp_path / "elsewhere").iterdir()) == [tmp_path / "elsewhere" / "thesis"]


# ---- The thread ----


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "push to the Hub"]


def test_pieces_of_work_are_done_one_after_the_other() -> None:
    work, done = PushInProgress(), list[int]()
    may_begin = threading.Event()
    work.run(lambda: may_begin.wait(LONGEST_WAIT_SECONDS))

    def note(number: int) -> int:
        done.append(number)
        return number

    jobs = [work.run(functools.partial(note, number)) for number in range(5)]
    assert not work.is_done() and done == []
    may_begin.set()
    assert [job.result(60) for job in jobs] == done == [0, 1, 2, 3, 4]
    assert work.wait_until_done() and work.is_done()


def test_an_error_is_that_of_its_future_and_the_next_piece_is_done() -> None:
    work = PushInProgress()
    failing = work.run(lambda: 1 / 0)
    assert work.run(lambda: "done").result(60) == "done"
    assert isinstance(failing.exception(60), ZeroDivisionError)


def test_what_has_not_begun_can_be_cancelled() -> None:
    work, has_begun, may_end = PushInProgress(), threading.Event(), threading.Event()

    def wait() -> bool:
        has_begun.set()
        return may_end.wait(LONGEST_WAIT_SECONDS)

    first = work.run(wait)
    second = work.run(lambda: None)
    assert has_begun.wait(LONGEST_WAIT_SECONDS)
    work.cancel()
    may_end.set()
    assert first.result(60) and work.wait_until_done()
    with pytest.raises(CancelledError):
        second.result(60)


def test_a_thread_without_an_owner_ends() -> None:
    before = threads()
    work = PushInProgress()
    work.run(lambda: None).result(60)
    (thread,) = [one for one in threads() if one not in before]
    del work
    gc.collect()
    thread.join(LONGEST_WAIT_SECONDS)
    assert not thread.is_alive()


def test_a_fork_of_the_process_does_not_wait_for_work_that_goes_on_in_the_first_one() -> None:
    work, may_end = PushInProgress(), threading.Event()
    work.run(lambda: may_end.wait(LONGEST_WAIT_SECONDS))
    child = os.fork()
    if child == 0:
        os._exit(work.is_at_work())
    assert work.is_at_work()
    may_end.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_end_of_the_program_waits_for_work_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    work, may_end = PushInProgress(), threading.Event()
    work.run(lambda: may_end.wait(LONGEST_WAIT_SECONDS))
    threading.Timer(0.05, may_end.set).start()
    work.finish_before_exit(60)
    assert work.is_done()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "The program ends when that is done; Ctrl-C ends it at once." in caplog.text


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


# ---- Saves that are left out ----


def test_the_newest_save_that_was_left_out_is_pushed_when_training_ends(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "littrainer.hub")
    answer, begun = threading.Event(), list[int]()
    hub.faults.append(Fault(PREUPLOAD, until=answer))

    class Listener(TrainerCallback):
        def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            begun.append(state.global_step)

    pushing_trainer(
        tmp_path,
        hub_always_push=False,
        hub_strategy="checkpoint",
        save_total_limit=1,
        given={"callbacks": [AtEnd(answer.set), Listener()]},
    ).train()
    assert hub.repository().messages() == [*WITH_CHECKPOINTS[:2], *WITH_CHECKPOINTS[4:]]
    assert below("last-checkpoint/", hub.repository().files()) == files_below(tmp_path / "run" / "checkpoint-6")
    assert begun == [2, 6]
    assert "was left out while an earlier push was on its way, and follows" in caplog.text
    assert not (tmp_path / "run" / SNAPSHOT_DIR).exists()


def test_a_save_that_was_left_out_does_not_go_over_a_newer_model_that_is_pushed_by_hand(
    hub: Hub, tmp_path: Path
) -> None:
    answer = threading.Event()
    hub.faults.append(Fault(PREUPLOAD, until=answer))
    trainer = pushing_trainer(tmp_path, hub_always_push=False, max_steps=5)

    def push_by_hand() -> None:
        answer.set()
        trainer.push_to_hub()

    trainer.add_callback(AtStep(5, push_by_hand))
    trainer.train()
    assert hub.repository().messages() == [SAVES[0], "End of training"]
    assert not (tmp_path / "run" / SNAPSHOT_DIR).exists()


def test_a_save_that_was_left_out_when_training_died_is_told_of(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answer = threading.Event()
    hub.faults.append(Fault(PREUPLOAD, until=answer))

    def die() -> None:
        raise KeyboardInterrupt

    trainer = pushing_trainer(tmp_path, hub_always_push=False, given={"callbacks": [AtStep(5, die)]})
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    answer.set()
    assert f'"{SAVES[1]}" to someone/run was left out meanwhile.' in caplog.text
    trainer.push_in_progress.wait_until_done()
    assert hub.repository().messages() == SAVES[:1]
    assert not (tmp_path / "run" / SNAPSHOT_DIR).exists()


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
