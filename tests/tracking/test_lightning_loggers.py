import csv
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, Logger

from littrainer import TrainerCallback, TrainingArguments
from littrainer.tracking import TensorBoardCallback
from littrainer.tracking.lightning_loggers import get_shared_loggers
from littrainer.tracking.shared_logger import SharedLogger
from tests.scenarios.trainers import quiet_arguments, quiet_trainer
from tests.tracking.both_sides import make_trainer
from tests.tracking.stores import read_events


class RecordingLogger(Logger):
    """A logger that records its calls, and fails for metrics that begin with `fails`."""

    def __init__(self, fails: str | None = None) -> None:
        super().__init__()
        self.fails = fails
        self.rows: list[tuple[int | None, dict[str, Any]]] = []
        self.parameters: dict[str, Any] = {}
        self.calls: list[str] = []

    name = "noted"
    version = "1"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self.fails is not None and any(name.startswith(self.fails) for name in metrics):
            raise ConnectionError("the server is gone")
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.parameters.update(params)

    def save(self) -> None:
        self.calls.append("save")

    def finalize(self, status: str) -> None:
        self.calls.append(status)


# Parameter groups with and without weight decay.
RATES = ["lr-AdamW/pg1", "lr-AdamW/pg2"]
LOGGED: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 1, "max_steps": 2}


def test_a_logger_gets_hyperparameters_metrics_and_the_end_of_the_run(tmp_path: Path) -> None:
    recorder = RecordingLogger()
    trainer = make_trainer("littrainer", tmp_path, report_to=recorder, max_steps=4)
    trainer.train()
    assert recorder.parameters["learning_rate"] == 0.01
    assert recorder.parameters["hidden_size"] == trainer.model.config.hidden_size
    assert recorder.parameters["report_to"] == ["RecordingLogger"]
    losses = [(step, row["train/loss"]) for step, row in recorder.rows if "train/loss" in row]
    assert losses == [(row["step"], row["loss"]) for row in trainer.state.log_history if "loss" in row]
    assert any("eval/accuracy" in row for _, row in recorder.rows)
    assert recorder.calls == ["success"]
    trainer.evaluate()
    assert "eval/loss" in recorder.rows[-1][1]
    assert recorder.calls == ["success", "save"]


def test_a_csv_logger_has_all_rows_and_names_other_loggers_by_class(tmp_path: Path) -> None:
    class WithSecret(RecordingLogger):
        api_key = "very secret"

        def __init__(self) -> None:
            super().__init__()
            self.key = "very secret"

    logger = CSVLogger(str(tmp_path / "csv"), name="run", version="one")
    lightning = {"logger": [WithSecret(), logger], "profiler": "simple", "enable_model_summary": False}
    trainer = quiet_trainer(tmp_path / "out", lightning=lightning, report_to=[logger], **LOGGED)
    trainer.train()
    trainer.evaluate()
    with open(tmp_path / "csv/run/one/metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["train/loss"]] == ["1", "2"]
    assert [row["step"] for row in rows if row["eval/loss"]] == ["2"]
    text = (tmp_path / "csv/run/one/hparams.yaml").read_text()
    assert yaml.safe_load(text)["lightning"] == {**lightning, "logger": ["WithSecret", "CSVLogger"]}
    assert "very secret" not in text


def test_a_failed_training_ends_the_run_as_failed(tmp_path: Path) -> None:
    class Failing(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError("broken")

    recorder = RecordingLogger()
    with pytest.raises(ZeroDivisionError):
        quiet_trainer(tmp_path, report_to=recorder, trainer_kwargs={"callbacks": [Failing()]}).train()
    assert recorder.calls == ["failed"]


@pytest.mark.parametrize("fails", ["train/", "lr-"])
def test_callbacks_of_lightning_log_to_the_same_run_and_a_failure_is_a_single_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    broken, recorder = RecordingLogger(fails), RecordingLogger()
    trainer = quiet_trainer(
        tmp_path,
        report_to=[broken, recorder, "tensorboard"],
        logging_dir=str(tmp_path / "events"),
        trainer_kwargs={"callbacks": [LearningRateMonitor()]},
        **LOGGED,
    )
    with caplog.at_level(logging.WARNING, "littrainer"):
        assert trainer.train().global_step == 2
    warnings = [record.getMessage() for record in caplog.records if "Reporting to" in record.getMessage()]
    assert warnings == [
        "Reporting to RecordingLogger failed (ConnectionError: the server is gone). Training continues, and nothing "
        "more is reported there."
    ]
    assert broken.calls == ["failed"]
    assert [name for _, row in recorder.rows for name in row if name.startswith("lr-")] == RATES * 2
    scalars = read_events(tmp_path / "events")["scalars"]
    assert [len(scalars[name]) for name in RATES] == [2, 2]
    assert len(list((tmp_path / "events").glob("events.*"))) == 1 and "train/train_loss" in scalars


def test_a_shared_logger_finds_its_run_when_it_starts(tmp_path: Path) -> None:
    callback = TensorBoardCallback()
    trainer = quiet_trainer(tmp_path, trainer_kwargs={"callbacks": [callback]}, max_steps=1)
    (shared,) = get_shared_loggers(trainer.callback_handler.callbacks)
    assert isinstance(shared, Logger)
    assert (shared.name, shared.version, shared.save_dir) == ("", "", None)
    assert not hasattr(shared, "experiment")
    shared.log_metrics({"a": 1.0}, step=1)
    callback.logging_dir = str(tmp_path / "events")
    callback.setup(trainer.args, trainer.state, trainer.model)
    assert shared.experiment is callback.tb_writer and shared.save_dir == str(tmp_path / "events")
    shared.finalize("success")
    shared.log_metrics({"b": 2.0}, step=3)
    callback.release()
    assert read_events(tmp_path / "events")["scalars"] == {"b": [(3, 2.0)]}


def test_a_shared_logger_has_the_version_of_the_first_run() -> None:
    tracker: Any = SimpleNamespace(has_failed=False, find_lightning_logger=lambda: SimpleNamespace(version=0))
    assert SharedLogger(tracker).version == 0


def test_loggers_in_arguments_are_copied_and_not_saved(tmp_path: Path) -> None:
    recorder = RecordingLogger()
    args = quiet_arguments(tmp_path, report_to=[recorder, "tensorboard"], project="mine")
    assert TrainingArguments(**args.to_dict()).report_to == [recorder, "tensorboard"]
    assert json.loads(args.to_json_string())["report_to"][1] == "tensorboard"
    assert isinstance(args.to_sanitized_dict()["report_to"], str)
    trainer = quiet_trainer(tmp_path, report_to=recorder, max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    assert torch.load(tmp_path / "model/training_args.bin", weights_only=False).report_to == []
