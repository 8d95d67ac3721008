from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer.tracking import TensorBoardCallback
from tests.scenarios.trainers import quiet_trainer
from tests.tracking.stores import read_events


def test_the_folder_is_that_of_logging_dir_before_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "environment"))
    quiet_trainer(tmp_path, report_to="tensorboard", max_steps=1, logging_dir=str(tmp_path / "argument")).train()
    assert list((tmp_path / "argument").glob("events.*"))
    assert not (tmp_path / "environment").exists()


def test_a_writer_of_the_user_is_used(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    callback = TensorBoardCallback(SummaryWriter(str(tmp_path / "mine")))
    assert callback.lightning_loggers() == []
    quiet_trainer(
        tmp_path, max_steps=2, logging_strategy="steps", logging_steps=1, trainer_kwargs={"callbacks": [callback]}
    ).train()
    assert [step for step, _ in read_events(tmp_path / "mine")["scalars"]["train/loss"]] == [1, 2]
    assert callback.tb_writer is None


def test_tensors_are_scalars_and_other_values_cause_a_single_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = quiet_trainer(tmp_path, report_to="tensorboard", logging_dir=str(tmp_path / "events"))
    for step in (1, 2):
        trainer.state.global_step = step
        trainer.log(
            {"tensor": torch.tensor(1.5), "note": "text", "gap": float("nan"), "rise": float("inf"), "shapes": [1, 2]}
        )
    events = read_events(tmp_path / "events")
    assert events["scalars"]["train/tensor"] == [(1, 1.5), (2, 1.5)]
    assert [str(value) for _, value in events["scalars"]["train/gap"]] == ["nan", "nan"]
    assert [value for _, value in events["scalars"]["train/rise"]] == [float("inf")] * 2
    assert events["texts"]["train/note/text_summary"] == "text"
    assert caplog.text.count("left out") == caplog.text.count("'train/shapes' is left out") == 1


def test_a_writer_is_closed_after_a_failure_and_the_next_training_creates_another(tmp_path: Path) -> None:
    class Failing(TensorBoardCallback):
        fails = True

        def write_logs(self, *args: Any, **keywords: Any) -> None:
            super().write_logs(*args, **keywords)
            if self.fails:
                raise OSError("the disk is full")

    callback = Failing()
    settings: dict[str, Any] = {"max_steps": 2, "logging_strategy": "steps", "logging_steps": 1}
    trainer = quiet_trainer(
        tmp_path, trainer_kwargs={"callbacks": [callback]}, logging_dir=str(tmp_path / "events"), **settings
    )
    trainer.train()
    assert callback.tb_writer is None
    callback.fails = False
    trainer.train()
    assert [step for step, _ in read_events(tmp_path / "events")["scalars"]["train/loss"]] == [1, 1, 2]
