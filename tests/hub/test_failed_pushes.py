"""Training continues if the Hub fails, refuses, is slow or resets connections."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from littrainer.hub.push_to_hub import SNAPSHOT_DIR
from littrainer.hub.repository import advise
from tests.hub.runs import AtStep, pushing_trainer
from tests.hub.server import MAIN, Fault, Hub
from tests.hub.test_pushing import SAVES
from tests.scenarios.other_processes import MAX_WAIT_SECONDS

COMMIT = "POST .*/commit/"


class StatusError(Exception):
    """An error with the HTTP status of a response."""

    def __init__(self, status: int) -> None:
        self.response = type("Response", (), {"status_code": status})


def test_each_error_comes_with_what_to_do() -> None:
    errors: dict[Exception, str] = {
        StatusError(401): "hf auth login",
        StatusError(413): "larger than the Hub takes",
        StatusError(429): "push less often",
        StatusError(503): "push again later",
        ConnectionResetError(): "connection was cut",
        RuntimeError("hf_xet: no route"): "HF_HUB_DISABLE_XET=1",
        ValueError("other"): "",
    }
    for error, advice in errors.items():
        assert advice in advise(error) and bool(advice) == bool(advise(error))


NOT_PUSHED = "push_to_hub_error"


def test_a_push_that_always_fails_is_a_warning_at_each_save_and_an_entry_in_the_results_of_a_training(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    advice = "connection was cut"
    hub.faults.append(Fault(COMMIT, cuts=True))
    trainer = pushing_trainer(tmp_path, hub_strategy="checkpoint")
    for step in (3, 5):
        trainer.add_callback(AtStep(step, lambda: trainer.push_in_progress.wait_until_done()))
    failure = trainer.train().metrics[NOT_PUSHED]
    assert '"Training in progress, step 6" to someone/run failed' in failure and advice in failure
    assert trainer.state.global_step == 6
    assert sorted(entry.name for entry in (tmp_path / "run").glob("c*")) == [f"checkpoint-{step}" for step in (2, 4, 6)]
    warnings = [record for record in caplog.records if "to someone/run failed" in record.getMessage()]
    assert all(record.levelno == logging.WARNING for record in warnings)
    *earlier, last = (record.getMessage() for record in warnings)
    # The last push may fail before the end of the training, and again in the retry.
    assert len(earlier) in (2, 3) and all("Training continues" in message for message in earlier)
    assert last.startswith(f"{failure} The last save is in output_dir")
    assert hub.repository().messages() == []
    with pytest.raises(Exception) as caught:
        trainer.push_to_hub()
    assert any(advice in note for note in caught.value.__notes__)
    # The failure is not reported by the next training.
    hub.faults.clear()
    assert NOT_PUSHED not in trainer.train().metrics
    assert hub.repository().messages()[::2] == SAVES


def test_the_last_push_is_retried_once(hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub.faults.append(Fault(COMMIT, 500, after=2, times=1))
    assert NOT_PUSHED not in pushing_trainer(tmp_path).train().metrics
    assert "is retried once" in caplog.text
    assert hub.repository().messages() == SAVES


def test_a_push_by_hand_that_fails_in_the_background_is_a_warning_and_the_error_of_its_future(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = pushing_trainer(tmp_path, save_strategy="no")
    hub.faults.append(Fault(COMMIT, 500))
    future: Any = trainer.push_to_hub(blocking=False)
    assert future.exception(timeout=MAX_WAIT_SECONDS) is not None
    trainer.push_in_progress.wait_until_done()
    assert "Pushing to someone/run failed" in caplog.text


def test_a_disk_without_room_for_a_push_does_not_end_training(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from littrainer.hub import push_to_hub as pushing

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pushing, "copy_files", full)
    trainer = pushing_trainer(tmp_path)
    assert "No space left on device" in trainer.train().metrics[NOT_PUSHED]
    assert trainer.state.global_step == 6
    assert hub.repository().branches[MAIN][1:] == []
    assert not (tmp_path / "run" / SNAPSHOT_DIR).exists()
