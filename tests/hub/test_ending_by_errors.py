"""Pushes of a training that fails continue, are logged, and do not prevent the end of the program."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.fidelity.conftest import ROOT, environment_of_runs
from tests.hub.runs import AtStep, pushing_trainer
from tests.hub.server import Fault, Hub
from tests.hub.test_pushing import CHECKPOINT_STRATEGIES, SAVES
from tests.scenarios.other_processes import MAX_WAIT_SECONDS, wait_until


def test_a_program_whose_training_died_ends_when_what_was_on_its_way_is_there(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    may_respond = threading.Event()
    hub.faults.append(Fault("POST .*/preupload/", until=may_respond))
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.hub.dying_process", str(tmp_path)],
            cwd=ROOT,
            env=environment_of_runs(),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:

        def is_waiting() -> bool:
            assert process.poll() is None, log.read_text()
            return "The program ends when that is done" in log.read_text()

        wait_until(is_waiting, "the process waits for its push")
        may_respond.set()
        assert process.wait(MAX_WAIT_SECONDS) == 1
    finally:
        process.kill()
        process.wait()
    output = log.read_text()
    assert 'The push of "Training in progress, step 2" to someone/run is running, and continues though' in output
    assert "MemoryError: no memory for the third step" in output and "failed" not in output
    assert hub.repository().messages() == CHECKPOINT_STRATEGIES[:2]
    assert not (tmp_path / "run" / ".littrainer_push").exists()


def test_a_failed_push_is_reported_again_when_its_training_dies(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.faults.append(Fault("POST .*/commit/", 403))
    trainer = pushing_trainer(tmp_path)

    def wait_and_die() -> None:
        trainer.push_in_progress.wait_until_done()
        raise KeyboardInterrupt

    trainer.add_callback(AtStep(3, wait_and_die))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    (error,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "Training in progress, step 2" in error.getMessage() and "is in output_dir" in error.getMessage()
    # Another training of this Trainer pushes the missing steps.
    hub.faults.clear()
    trainer.callback_handler.callbacks.pop()
    trainer.train(resume_from_checkpoint=True)
    assert hub.repository().messages() == SAVES[1:]
