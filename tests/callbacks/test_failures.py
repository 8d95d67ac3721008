from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from littrainer.callbacks.base import TrainerCallback
from littrainer.callbacks.progress import ProgressCallback
from tests.scenarios.trainers import quiet_trainer


class Breaks(TrainerCallback):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        raise self.error


class Hears(TrainerCallback):
    """Notes the error that training ended with, and raises one of its own."""

    def __init__(self, raises: BaseException | None = None) -> None:
        self.heard: list[BaseException] = []
        self.raises = raises

    def on_training_failed(self, args: Any, state: Any, error: BaseException) -> None:
        self.heard.append(error)
        if self.raises is not None:
            raise self.raises


@pytest.mark.parametrize("error", [ZeroDivisionError("broken"), KeyboardInterrupt()])
def test_a_callback_hears_what_training_ended_with(tmp_path: Path, error: BaseException) -> None:
    first, second = Hears(ValueError("my own")), Hears()
    trainer = quiet_trainer(tmp_path, given={"callbacks": [first, Breaks(error), second]})
    with pytest.raises(type(error)) as raised:
        trainer.train()
    assert raised.value is error
    assert first.heard == second.heard == [error]


def test_an_error_of_a_callback_that_hears_of_it_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callbacks = [Hears(ValueError("my own")), Breaks(ZeroDivisionError())]
    with pytest.raises(ZeroDivisionError):
        quiet_trainer(tmp_path, given={"callbacks": callbacks}).train()
    assert "Hears.on_training_failed failed" in caplog.text
    assert "my own" in caplog.text


def test_a_second_interruption_leaves_the_first_error_and_tells_nobody_else(tmp_path: Path) -> None:
    first, second = Hears(KeyboardInterrupt()), Hears()
    trainer = quiet_trainer(tmp_path, given={"callbacks": [first, Breaks(ZeroDivisionError()), second]})
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert (len(first.heard), second.heard) == (1, [])


def test_a_training_that_ends_well_tells_nobody(tmp_path: Path) -> None:
    hears = Hears()
    quiet_trainer(tmp_path, max_steps=1, given={"callbacks": [hears]}).train()
    assert hears.heard == []


@pytest.mark.parametrize("error", [ZeroDivisionError("broken"), KeyboardInterrupt()])
def test_the_bars_of_a_training_that_failed_are_closed(tmp_path: Path, error: BaseException) -> None:
    class Keeps(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            bars.append(progress.training_bar)

    bars: list[Any] = []
    trainer = quiet_trainer(tmp_path, disable_tqdm=False, given={"callbacks": [Keeps(), Breaks(error)]})
    progress = next(one for one in trainer.callback_handler.callbacks if isinstance(one, ProgressCallback))
    with pytest.raises(type(error)):
        trainer.train()
    # tqdm sets it where a bar is closed.
    assert bars[0].disable
    assert progress.training_bar is None
