from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import TrainerCallback
from littrainer.loop import clock
from tests.scenarios.trainers import quiet_trainer


@pytest.fixture(autouse=True)
def minutes(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list with the time in minutes, which callbacks below advance."""
    now = [0.0]
    monkeypatch.setattr(clock.time, "monotonic", lambda: 60 * now[0])
    return now


class AMinuteAStep(TrainerCallback):
    """A callback that advances the clock by a minute per step and records saves and evaluations."""

    def __init__(self, minutes: list[float], at_step: dict[int, Callable[[], object]] | None = None):
        self.minutes, self.at_step = minutes, at_step or {}
        self.saved: list[int] = []
        self.evaluated: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.minutes[0] += 1
        self.at_step.get(state.global_step + 1, lambda: None)()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved.append(state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluated.append(state.global_step)


def test_saves_and_evaluations_follow_the_minutes_since_the_last(tmp_path: Path, minutes: list[float]) -> None:
    callback = AMinuteAStep(minutes)
    changes = {"save_strategy": "steps", "save_steps": 5, "save_minutes": 3, "eval_minutes": 2}
    quiet_trainer(tmp_path, trainer_kwargs={"callbacks": [callback]}, max_steps=10, **changes).train()
    assert (callback.saved, callback.evaluated) == ([3, 5, 8, 10], [2, 4, 6, 8, 10])


def test_a_training_ended_by_max_minutes_resumes_exactly(tmp_path: Path, minutes: list[float]) -> None:
    def make_trainer(folder: Path, **changes: Any) -> Any:
        parameters = {"callbacks": [AMinuteAStep(minutes)]}
        return quiet_trainer(folder, trainer_kwargs=parameters, max_steps=7, save_strategy="steps", **changes)

    reference = make_trainer(tmp_path / "reference")
    assert "ended_by" not in reference.train().metrics
    for expected in (4, 7):
        cut = make_trainer(tmp_path / "cut", max_minutes=4)
        output = cut.train(resume_from_checkpoint=expected > 4)
        assert cut.state.global_step == expected
        assert output.metrics.get("ended_by") == ("max_minutes" if expected == 4 else None)
        assert (tmp_path / "cut" / f"checkpoint-{expected}").is_dir()
    torch.testing.assert_close(cut.model.state_dict(), reference.model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(("name", "steps"), [("SAVE", 6), ("STOP", 3)])
def test_a_request_file_in_the_run_folder_saves_or_stops(
    tmp_path: Path, minutes: list[float], caplog: pytest.LogCaptureFixture, name: str, steps: int
) -> None:
    callback = AMinuteAStep(minutes, {3: (tmp_path / name).touch})
    trainer = quiet_trainer(tmp_path, trainer_kwargs={"callbacks": [callback]}, max_steps=6)
    trainer.train()
    assert (trainer.state.global_step, callback.saved) == (steps, [3])
    assert not (tmp_path / name).exists()
    assert f"{name}: training saves" in caplog.text


def test_a_file_of_an_earlier_training_is_deleted_with_a_warning(
    tmp_path: Path, minutes: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "STOP").touch()
    trainer = quiet_trainer(tmp_path, trainer_kwargs={"callbacks": [AMinuteAStep(minutes)]}, max_steps=3)
    trainer.train()
    assert trainer.state.global_step == 3 and not (tmp_path / "STOP").exists()
    assert f"{tmp_path / 'STOP'} was there before this training began" in caplog.text


def test_minutes_below_zero_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_minutes"):
        quiet_trainer(tmp_path, max_minutes=-1)


def test_a_request_file_that_cannot_be_deleted_counts_once_until_it_is_created_again(
    tmp_path: Path, minutes: list[float], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == file:
            raise PermissionError(13, "not yours", str(path))
        unlink(path, missing_ok)

    file, unlink = tmp_path / "SAVE", Path.unlink
    callback = AMinuteAStep(minutes, {2: file.touch, 5: lambda: os.remove(file), 6: file.touch})
    trainer = quiet_trainer(tmp_path, trainer_kwargs={"callbacks": [callback]}, max_steps=7)
    monkeypatch.setattr(clock.Path, "unlink", refuse)
    trainer.train()
    assert callback.saved == [2, 6]
    assert caplog.text.count("could not be deleted") == 2
