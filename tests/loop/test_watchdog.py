"""Hung trainings in this process, on a fake clock; distributed/test_restarts.py has others."""

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
    """Advance the watchdog's clock by a minute, and wait for its next checks."""
    now, checks = [0.0], [0]
    read_progress = Watchdog._read_progress

    def count(self: Watchdog) -> Any:
        progress = read_progress(self)
        checks[0] += 1
        return progress

    monkeypatch.setattr(Watchdog, "_read_progress", count)
    monkeypatch.setattr(watchdog, "MAX_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])

    def advance() -> None:
        now[0] += 60
        last = checks[0] + 3
        while checks[0] < last:
            threading.Event().wait(0.01)

    yield advance


class In(TrainerCallback):
    """A callback that calls a function in some events."""

    def __init__(self, function: Callable[[], object], *events: str):
        for event in events:
            setattr(self, event, lambda *_, **__: function())


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
    parameters = {"callbacks": [In(a_minute, "on_step_end", "on_prediction_step")]}
    trainer = quiet_trainer(tmp_path, kind=Slow, trainer_kwargs=parameters, max_steps=3, hang_timeout=100, **saves)
    assert trainer.train().global_step == 3
    assert not (tmp_path / STACKS_NAME).exists()


def test_a_hung_training_ends_with_an_error_after_its_stacks_and_its_last_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_for_a_lock() -> None:
        threading.Event().wait(3600)

    def record_thread(self: WindowLoader, *position: int) -> Any:
        threads.append(threading.current_thread())
        return find_rows(self, *position)

    # Finding the rows changes random generators, so only the training thread may do so.
    threads, find_rows = list[threading.Thread](), WindowLoader.find_rows
    monkeypatch.setattr(WindowLoader, "find_rows", record_thread)
    child = multiprocessing.Process(target=time.sleep, args=(3600,), daemon=True)
    child.start()
    handler = signal.getsignal(signal.SIGINT)
    parameters = {"callbacks": [In(wait_for_a_lock, "on_step_end")]}
    settings = {"max_steps": 3, "hang_timeout": 1, "train_sampling_strategy": "sequential"}
    trainer = quiet_trainer(tmp_path, trainer_kwargs=parameters, **settings)
    with pytest.raises(HangError, match=r"has not moved for 1 s \(hang_timeout\), at optimizer step 1 of 3"):
        trainer.train()
    assert signal.getsignal(signal.SIGINT) is handler
    for printed in (capsys.readouterr().err, (tmp_path / STACKS_NAME).read_text()):
        assert "in wait_for_a_lock" in printed and "Last collective operation: not known\n" in printed
        assert "Last micro-batch: number 1 of epoch 0, rows 0, 1, 2, 3.\n" in printed
    assert threads == [threading.main_thread()]
    # The child process is no loader worker.
    assert child.is_alive()
    child.kill()
    del parameters["callbacks"][0].on_step_end
    assert trainer.train().global_step == 3


def test_no_heartbeat_remains_if_a_script_catches_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (reports := tmp_path / "reports").mkdir()
    monkeypatch.setenv(REPORTS, f"{os.getppid()}:{reports}")
    parameters = {"callbacks": [In(lambda: threading.Event().wait(3600), "on_step_end")]}
    with pytest.raises(HangError):
        quiet_trainer(tmp_path, trainer_kwargs=parameters, max_steps=3, hang_timeout=1).train()
    assert [*reports.glob(f"{HEARTBEAT_FILE}*")] == []


def test_ctrl_c_is_the_users_while_a_training_is_watched(tmp_path: Path) -> None:
    parameters = {"callbacks": [In(lambda: os.kill(os.getpid(), signal.SIGINT), "on_step_begin")]}
    with pytest.raises(KeyboardInterrupt):
        quiet_trainer(tmp_path, trainer_kwargs=parameters, max_steps=3, hang_timeout=600).train()


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
        time.sleep(0)
    assert not running._thread.is_alive()
