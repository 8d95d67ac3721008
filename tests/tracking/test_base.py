"""The base class of trackers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from littrainer import Trainer, TrainingArguments
from littrainer.tracking import TrackerCallback
from littrainer.tracking.base import collect_hyperparameters, convert_to_number
from tests.scenarios.trainers import quiet_arguments, quiet_trainer


def record_call(name: str) -> Any:
    """Return a method that records its name, and raises the tracker's error if its name is `fails_at`."""

    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        self.calls.append(name)
        if name == self.fails_at:
            raise self.error

    return method


class RecordingTracker(TrackerCallback):
    """A tracker that records its calls, and raises an error in `fails_at`."""

    reports_predictions = True
    write_logs, release = record_call("write_logs"), record_call("release")
    write_prediction_metrics, end_failed_run = record_call("write_prediction_metrics"), record_call("end_failed_run")

    def __init__(self, fails_at: str = "", error: BaseException | None = None) -> None:
        self.fails_at, self.error = fails_at, error or ConnectionError("no route\nto the server")
        self.calls: list[str] = []

    def setup(self, args: Any, state: Any, model: Any, optimizer: Any = None) -> None:  # type: ignore[override]
        record_call("setup")(self)
        assert optimizer is not None or not state.max_steps


def make_trainer(folder: Path, tracker: TrackerCallback) -> Trainer:
    return quiet_trainer(
        folder, trainer_kwargs={"callbacks": [tracker]}, logging_strategy="steps", logging_steps=1, max_steps=3
    )


def test_setup_is_called_once_with_its_keywords_and_each_log_is_written(tmp_path: Path) -> None:
    tracker = RecordingTracker()
    trainer = make_trainer(tmp_path, tracker)
    trainer.train()
    trainer.predict(trainer.eval_dataset)
    assert tracker.calls == ["setup", *["write_logs"] * 4, "write_prediction_metrics"]


@pytest.mark.parametrize("fails_at", ["setup", "write_logs"])
def test_a_failure_is_a_single_warning_and_the_next_training_tries_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fails_at: str
) -> None:
    tracker = RecordingTracker(fails_at)
    trainer = make_trainer(tmp_path, tracker)
    for _ in range(2):
        caplog.clear()
        assert trainer.train().global_step == 3
        trainer.evaluate()
        assert [record.getMessage() for record in caplog.records if "Reporting" in record.getMessage()] == [
            "Reporting to RecordingTracker failed (ConnectionError: no route). Training continues, and nothing more is "
            "reported there."
        ]
        assert tracker.has_failed
        assert tracker.calls[-2:] == [fails_at, "release"]
    tracker.fails_at, tracker.calls = "", []
    trainer.train()
    assert tracker.calls == ["setup", *["write_logs"] * 4]


def test_a_tracker_does_not_catch_interruptions(tmp_path: Path) -> None:
    tracker = RecordingTracker("write_logs", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path, tracker).train()
    assert tracker.calls == ["setup", "write_logs", "end_failed_run"] and not tracker.has_failed


def test_only_the_first_process_writes(tmp_path: Path) -> None:
    tracker = RecordingTracker()
    trainer = make_trainer(tmp_path, tracker)
    trainer.state.is_world_process_zero = False
    trainer.log({"loss": 1.0})
    assert tracker.calls == ["setup"]


def test_arguments_override_the_model_config_and_secrets_are_masked(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class WithSecret(TrainingArguments):
        service_api_key: str = "very secret"

    args = quiet_arguments(
        tmp_path,
        WithSecret,
        hub_token="very secret",
        lr_scheduler_kwargs={"token": "very secret"},
        run_name="http://me:very-secret@h",
    )
    config = {"learning_rate": "of the config", "loader": {"API_KEY": "very secret"}, "pad_token": "<pad>"}
    parameters = collect_hyperparameters(args, SimpleNamespace(config=config, peft_config={"default": "lora"}))
    assert (parameters["learning_rate"], parameters["peft_config"]) == (0.01, {"default": "lora"})
    assert (parameters["loader"], parameters["pad_token"]) == ({"API_KEY": "<API_KEY>"}, "<pad>")
    assert (parameters["lr_scheduler_kwargs"], parameters["run_name"]) == ({"token": "<TOKEN>"}, "http://h")
    assert parameters["service_api_key"] == "<SERVICE_API_KEY>" and "very secret" not in str(parameters)


NUMBERS: list[tuple[Any, Any]] = [
    *((3, 3), (0.5, 0.5), (True, True), (float("inf"), float("inf"))),
    *((torch.tensor(1.5), 1.5), (torch.tensor([2]), 2), (np.float32(0.25), 0.25), (np.array([4.0]), 4.0)),
    *(("text", None), (None, None), ([1.0], None), (torch.ones(2), None), (torch.tensor(1j), None), (int, None)),
]


def test_tensors_and_arrays_with_a_single_element_are_numbers() -> None:
    assert [convert_to_number(value) for value, _ in NUMBERS] == [number for _, number in NUMBERS]
