"""What the callbacks of all trackers share."""

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
from littrainer.tracking.base import convert_to_number, hyperparameters
from tests.scenarios.trainers import quiet_arguments, quiet_trainer


def noting(name: str) -> Any:
    """A method that notes its name, and raises the tracker's error if it is the one that breaks."""

    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        self.calls.append(name)
        if name == self.breaks_at:
            raise self.error

    return method


class NotingTracker(TrackerCallback):
    """Notes what it is asked for, and raises an error if it is asked for `breaks_at`."""

    reports_predictions = True
    write_logs, release = noting("write_logs"), noting("release")
    write_prediction_metrics, end_failed_run = noting("write_prediction_metrics"), noting("end_failed_run")

    def __init__(self, breaks_at: str = "", error: BaseException | None = None) -> None:
        self.breaks_at, self.error = breaks_at, error or ConnectionError("no route\nto the server")
        self.calls: list[str] = []

    def setup(self, args: Any, state: Any, model: Any, optimizer: Any = None) -> None:  # type: ignore[override]
        noting("setup")(self)
        assert optimizer is not None or not state.max_steps


def trainer_with(folder: Path, tracker: TrackerCallback) -> Trainer:
    return quiet_trainer(folder, given={"callbacks": [tracker]}, logging_strategy="steps", logging_steps=1, max_steps=3)


def test_a_run_is_set_up_once_with_the_keywords_that_setup_takes_and_each_log_is_written(tmp_path: Path) -> None:
    tracker = NotingTracker()
    trainer = trainer_with(tmp_path, tracker)
    trainer.train()
    trainer.predict(trainer.eval_dataset)
    assert tracker.calls == ["setup", *["write_logs"] * 4, "write_prediction_metrics"]


@pytest.mark.parametrize("breaks_at", ["setup", "write_logs"])
def test_a_failure_is_told_once_with_service_and_cause_and_the_next_training_tries_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, breaks_at: str
) -> None:
    tracker = NotingTracker(breaks_at)
    trainer = trainer_with(tmp_path, tracker)
    for _ in range(2):
        caplog.clear()
        assert trainer.train().global_step == 3
        trainer.evaluate()
        assert [record.getMessage() for record in caplog.records if "Reporting" in record.getMessage()] == [
            "Reporting to NotingTracker failed (ConnectionError: no route). Training continues, and nothing more is "
            "reported there."
        ]
        assert tracker.has_failed
        assert tracker.calls[-2:] == [breaks_at, "release"]
    tracker.breaks_at, tracker.calls = "", []
    trainer.train()
    assert tracker.calls == ["setup", *["write_logs"] * 4]


def test_an_interruption_goes_through_a_tracker(tmp_path: Path) -> None:
    tracker = NotingTracker("write_logs", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        trainer_with(tmp_path, tracker).train()
    assert tracker.calls == ["setup", "write_logs", "end_failed_run"] and not tracker.has_failed


def test_only_the_first_process_writes(tmp_path: Path) -> None:
    tracker = NotingTracker()
    trainer = trainer_with(tmp_path, tracker)
    trainer.state.is_world_process_zero = False
    trainer.log({"loss": 1.0})
    assert tracker.calls == ["setup"]


def test_hyperparameters_are_the_model_config_and_the_arguments_over_it_without_secrets(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Keyed(TrainingArguments):
        service_api_key: str = "very secret"

    args = quiet_arguments(
        tmp_path,
        Keyed,
        hub_token="very secret",
        lr_scheduler_kwargs={"token": "very secret"},
        run_name="http://me:very-secret@h",
    )
    config = {"learning_rate": "of the config", "loader": {"API_KEY": "very secret"}, "pad_token": "<pad>"}
    shown = hyperparameters(args, SimpleNamespace(config=config, peft_config={"default": "lora"}))
    assert (shown["learning_rate"], shown["peft_config"]) == (0.01, {"default": "lora"})
    assert (shown["loader"], shown["pad_token"]) == ({"API_KEY": "<API_KEY>"}, "<pad>")
    assert (shown["lr_scheduler_kwargs"], shown["run_name"]) == ({"token": "<TOKEN>"}, "http://h")
    assert shown["service_api_key"] == "<SERVICE_API_KEY>" and "very secret" not in str(shown)


NUMBERS: list[tuple[Any, Any]] = [
    *((3, 3), (0.5, 0.5), (True, True), (float("inf"), float("inf"))),
    *((torch.tensor(1.5), 1.5), (torch.tensor([2]), 2), (np.float32(0.25), 0.25), (np.array([4.0]), 4.0)),
    *(("text", None), (None, None), ([1.0], None), (torch.ones(2), None), (torch.tensor(1j), None), (int, None)),
]


def test_tensors_and_arrays_of_one_number_are_numbers() -> None:
    assert [convert_to_number(value) for value, _ in NUMBERS] == [number for _, number in NUMBERS]
