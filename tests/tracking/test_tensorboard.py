import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import TrainerCallback, TrainingArguments
from littrainer.tracking import TensorBoardCallback
from tests.scenarios.models import tiny_bert_classifier
from tests.scenarios.trainers import quiet_trainer
from tests.tracking.both_sides import trainer_of
from tests.tracking.stores import read_events


def test_the_folder_is_that_of_logging_dir_before_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "environment"))
    quiet_trainer(tmp_path, report_to="tensorboard", max_steps=1, logging_dir=str(tmp_path / "argument")).train()
    assert list((tmp_path / "argument").glob("events.*"))
    assert not (tmp_path / "environment").exists()


def test_a_writer_that_is_given_is_written_with(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    callback = TensorBoardCallback(SummaryWriter(str(tmp_path / "mine")))
    assert callback.lightning_loggers() == []
    quiet_trainer(
        tmp_path, max_steps=2, logging_strategy="steps", logging_steps=1, given={"callbacks": [callback]}
    ).train()
    assert [step for step, _ in read_events(tmp_path / "mine")["scalars"]["train/loss"]] == [1, 2]
    assert callback.tb_writer is None


class LogsEverything(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].trainer.log(
            {"tensor": torch.tensor(1.5), "note": "text", "gap": float("nan"), "rise": float("inf"), "shapes": [1, 2]}
        )


def test_tensors_are_numbers_text_is_text_and_what_is_neither_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_bert_classifier()
    trainer = trainer_of(
        "littrainer",
        tmp_path,
        model=model,
        report_to="tensorboard",
        logging_dir=str(tmp_path / "events"),
        max_steps=2,
        eval_strategy="no",
        callbacks=[LogsEverything()],
    )
    object.__setattr__(model, "trainer", trainer)
    with caplog.at_level(logging.WARNING, "littrainer"):
        trainer.train()
    scalars = read_events(tmp_path / "events")["scalars"]
    assert scalars["train/tensor"] == [(1, 1.5), (2, 1.5)]
    assert [str(value) for _, value in scalars["train/gap"]] == ["nan", "nan"]
    assert [value for _, value in scalars["train/rise"]] == [float("inf")] * 2
    assert read_events(tmp_path / "events")["texts"]["train/note/text_summary"] == "text"
    told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(told) == 1
    assert "'train/shapes'" in told[0]


def test_a_writer_that_fails_is_closed_and_the_next_training_has_another(tmp_path: Path) -> None:
    class Breaks(TensorBoardCallback):
        breaks = True

        def write_logs(self, *args: Any, **kwargs: Any) -> None:
            super().write_logs(*args, **kwargs)
            if self.breaks:
                self.first = self.tb_writer
                raise OSError("the disk is full")

    callback = Breaks()
    callback.logging_dir = str(tmp_path / "events")
    trainer = quiet_trainer(
        tmp_path, max_steps=2, logging_strategy="steps", logging_steps=1, given={"callbacks": [callback]}
    )
    trainer.train()
    assert callback.tb_writer is None
    assert callback.first.file_writer is None
    callback.breaks = False
    trainer.train()
    assert [step for step, _ in read_events(tmp_path / "events")["scalars"]["train/loss"]] == [1, 1, 2]


def test_secrets_in_arguments_of_a_subclass_are_not_written(tmp_path: Path) -> None:
    class KeyedArguments(TrainingArguments):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

        def to_dict(self) -> dict[str, Any]:
            return {**super().to_dict(), "service_api_key": "very secret"}

    trainer = quiet_trainer(tmp_path, report_to="tensorboard", max_steps=1, logging_dir=str(tmp_path / "events"))
    trainer.args.__class__ = KeyedArguments
    trainer.train()
    written = b"".join(path.read_bytes() for path in (tmp_path / "events").iterdir())
    assert b"<SERVICE_API_KEY>" in written
    assert b"very secret" not in written
