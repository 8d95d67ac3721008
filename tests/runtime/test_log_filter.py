from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core import rank_zero

from littrainer import TrainerCallback
from littrainer.runtime.log_filter import NOISY_LOGGERS, quiet_lightning
from tests.scenarios.trainers import quiet_trainer


@pytest.fixture
def chatter(caplog: pytest.LogCaptureFixture) -> Any:
    """Yield a function that returns Lightning's messages to the user."""
    with caplog.at_level(logging.INFO), warnings.catch_warnings():
        warnings.simplefilter("always")
        yield lambda: [record.getMessage() for record in caplog.records if record.name in NOISY_LOGGERS]


def test_lightning_is_silent_although_its_separate_packages_were_imported(
    tmp_path: Path, chatter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_zero, "log", logging.getLogger("pytorch_lightning.utilities.rank_zero"))
    rank_zero.rank_zero_info("The logger works.")
    quiet_trainer(tmp_path, max_steps=1).train()
    assert chatter() == ["The logger works."]


def test_nested_trainings_are_silent(tmp_path: Path, chatter: Any) -> None:
    class TrainsAnother(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            quiet_trainer(tmp_path / "inner", max_steps=1).train()

    quiet_trainer(tmp_path / "outer", trainer_kwargs={"callbacks": [TrainsAnother()]}, max_steps=2).train()
    assert chatter() == []


def test_messages_of_a_lightning_callback_are_shown(tmp_path: Path, chatter: Any) -> None:
    callback = ModelCheckpoint(str(tmp_path), monitor="loss", verbose=True, every_n_train_steps=1)
    quiet_trainer(
        tmp_path, trainer_kwargs={"callbacks": [callback]}, max_steps=1, logging_strategy="steps", logging_steps=1
    ).train()
    (message,) = chatter()
    assert "'loss' reached" in message


def test_filters_are_restored_in_any_order() -> None:
    loggers = [logging.getLogger(name) for name in NOISY_LOGGERS]

    def advice() -> list[Any]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.warn("The x does not have many workers which may be a bottleneck", stacklevel=1)
        return seen

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        before = [logger.filters[:] for logger in loggers], warnings.filters[:]
        first, second = quiet_lightning(), quiet_lightning()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert advice() == []
        second.__exit__(None, None, None)
        assert ([logger.filters[:] for logger in loggers], warnings.filters[:]) == before
        assert len(advice()) == 1
