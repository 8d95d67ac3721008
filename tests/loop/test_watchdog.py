"""Trainings that hang, in this process, on a clock that only they move; others are in distributed/test_restarts.py."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from littrainer import Trainer, TrainerCallback
from littrainer.checkpoint.layout import STACKS_NAME
from littrainer.data.windows import WindowLoader
from littrainer.distributed.environment import HANG_TIMEOUT, REPORTS
from littrainer.distributed.failures import HEARTBEAT_FILE, HangError
from littrainer.loop import watchdog
from littrainer.loop.watchdog import Watchdog
from tests.scenarios.other_processes import wait_until
from tests.scenarios.trainers import quiet_arguments, quiet_trainer


@pytest.fixture
def a_minute(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Lets a minute go by on the watchdog's clock, in which it looks."""
    now, looks = [0.0], [0]
    progress = Watchdog._progress

    def counted(self: Watchdog) -> Any:
        found = progress(self)
        looks[0] += 1
        return found

    monkeypatch.setattr(Watchdog, "_progress", counted)
    monkeypatch.setattr(watchdog, "MAX_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])

    def pass_by() -> None:
        now[0] += 60
        seen = looks[0]
        while looks[0] < seen + 3:
            # The clock of the test is the one that stands still.
            threading.Event().wait(0.01)

    yield pass_by


class In(TrainerCallback):
    """Calls a function in each of some events."""

    def __init__(self, does: Callable[[], object], *events: str):
        for event in events:
            setattr(self, event, lambda *_, **__: does())


@pytest.mark.parametrize("folder", [".", "run-0"], ids=["a training", "a trial"])
def test_steps_batches_of_an_evaluation_and_files_of_a_save_count_as_progress(
    tmp_path: Path, a_minute: Callable[[], None], folder: str
) -> None:
    class Slow(Trainer):
        def _get_output_dir(self, trial: Any) -> str:
            return str(tmp_path / folder)

        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)
            for number in range(3):
                Path(output_dir, f"part{number}.txt").write_text("a part of a large model")
                a_minute()

    saves = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    given = {"callbacks": [In(a_minute, "on_step_end", "on_prediction_step")]}
    trainer = quiet_trainer(tmp_path, kind=Slow, given=given, max_steps=3, hang_timeout=100, **saves)
    assert trainer.train().global_step == 3
    # Without one of them 100 seconds would be over.
    assert not (tmp_path / STACKS_NAME).exists()


def test_a_training_that_waits_for_ever_ends_with_an_error_after_its_stacks_and_its_last_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_for_a_lock() -> None:
        threading.Event().wait(3600)

    def noted_rows(self: WindowLoader, *place: int) -> Any:
        moving.append(threading.current_thread())
        return find_rows(self, *place)

    # Random generators are moved to find the rows, by no other thread than the one that draws from them.
    moving, find_rows = list[threading.Thread](), WindowLoader.find_rows
    monkeypatch.setattr(WindowLoader, "find_rows", noted_rows)
    child = multiprocessing.Process(target=time.sleep, args=(3600,), daemon=True)
    child.start()
    handler = signal.getsignal(signal.SIGINT)
    given = {"callbacks": [In(wait_for_a_lock, "on_step_end")]}
    trainer = quiet_trainer(tmp_path, given=given, max_steps=3, hang_timeout=1, train_sampling_strategy="sequential")
    with pytest.raises(HangError, match=r"has not moved for 1 s \(hang_timeout\), at optimizer step 1 of 3"):
        trainer.train()
    assert signal.getsignal(signal.SIGINT) is handler
    told = capsys.readouterr().err
    for printed in (told, (tmp_path / STACKS_NAME).read_text()):
        assert "in wait_for_a_lock" in printed and "Last collective operation: not known\n" in printed
        assert "Last micro-batch: number 1 of epoch 0, rows 0, 1, 2, 3.\n" in printed
    assert moving == [threading.main_thread()]
    # The child process reads no data, so it is no worker of a loader.
    assert child.is_alive()
    child.kill()
    # It can train again.
    del given["callbacks"][0].on_step_end
    assert trainer.train().global_step == 3


def test_a_script_that_catches_the_error_is_no_longer_expected_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (reports := tmp_path / "reports").mkdir()
    monkeypatch.setenv(REPORTS, f"{os.getppid()}:{reports}")
    given = {"callbacks": [In(lambda: threading.Event().wait(3600), "on_step_end")]}
    with pytest.raises(HangError):
        quiet_trainer(tmp_path, given=given, max_steps=3, hang_timeout=1).train()
    assert [*reports.glob(f"{HEARTBEAT_FILE}*")] == []


def test_ctrl_c_is_the_users_while_a_training_is_watched(tmp_path: Path) -> None:
    given = {"callbacks": [In(lambda: os.kill(os.getpid(), signal.SIGINT), "on_step_begin")]}
    with pytest.raises(KeyboardInterrupt):
        quiet_trainer(tmp_path, given=given, max_steps=3, hang_timeout=600).train()


def test_the_command_line_overrides_the_argument_and_without_both_nothing_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(**changes: Any) -> float:
        return Watchdog(quiet_arguments(tmp_path, **changes), lambda: None, lambda: (None, None)).seconds  # type: ignore[arg-type, return-value]

    assert (seconds(), seconds(hang_timeout=7)) == (0, 7)
    monkeypatch.setenv(HANG_TIMEOUT, "30.0")
    assert seconds(hang_timeout=7) == 30
    with Watchdog(quiet_arguments(tmp_path), lambda: None, lambda: (None, None)) as running:  # type: ignore[arg-type, return-value]
        wait_until(lambda: running._thread.is_alive(), "the watchdog")
        # It sees no training, so there is nothing that could hang.
        time.sleep(0)
    assert not running._thread.is_alive()
