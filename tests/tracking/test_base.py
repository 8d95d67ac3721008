"""What the callbacks of all trackers share."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from littrainer.tracking import TrackerCallback, base
from littrainer.tracking.base import as_number, hyperparameters, only_numbers, with_tracked_names
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

LOGGED: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 1, "max_steps": 3}


class NotingTracker(TrackerCallback):
    """Notes what it is asked for, and raises the error that it was made with where it is asked for `breaks_at`."""

    reports_predictions = True

    def __init__(self, breaks_at: str = "", error: BaseException | None = None) -> None:
        self.breaks_at, self.error = breaks_at, error or ConnectionError("no route\nto the server")
        self.calls: list[str] = []

    def note(self, name: str) -> None:
        self.calls.append(name)
        if name == self.breaks_at:
            raise self.error

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        self.note("setup")

    def write_logs(self, logs: dict[str, Any], args: Any, state: Any, model: Any = None) -> None:
        self.note("write_logs")

    def write_prediction_metrics(self, metrics: dict[str, Any], args: Any, state: Any) -> None:
        self.note("write_prediction_metrics")

    def end_failed_run(self, args: Any, state: Any, error: BaseException) -> None:
        self.note(f"end_failed_run: {error}")

    def release(self) -> None:
        self.note("release")


def test_a_run_is_set_up_once_with_the_keywords_that_setup_takes_and_each_log_is_written(tmp_path: Path) -> None:
    class Named(NotingTracker):
        def setup(self, args: Any, state: Any, model: Any, optimizer: Any = None) -> None:  # type: ignore[override]
            self.note(f"setup with {type(optimizer).__name__}")

    tracker = Named()
    trainer = quiet_trainer(tmp_path, given={"callbacks": [tracker]}, **LOGGED)
    trainer.train()
    trainer.predict(trainer.eval_dataset)
    assert tracker.calls == ["setup with AdamW", *["write_logs"] * 4, "write_prediction_metrics"]


@pytest.mark.parametrize("breaks_at", ["setup", "write_logs"])
def test_a_failure_is_told_once_with_service_and_cause_and_the_next_training_tries_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, breaks_at: str
) -> None:
    tracker = NotingTracker(breaks_at)
    trainer = quiet_trainer(tmp_path, given={"callbacks": [tracker]}, **LOGGED)
    for _ in range(2):
        caplog.clear()
        assert trainer.train().global_step == 3
        trainer.evaluate()
        assert [record.getMessage() for record in caplog.records if "Reporting" in record.getMessage()] == [
            "Reporting to NotingTracker failed (ConnectionError: no route). Training goes on, and nothing more is "
            "reported there."
        ]
        assert tracker.has_failed
        assert tracker.calls[-2:] == [breaks_at, "release"]
    tracker.breaks_at, tracker.calls = "", []
    trainer.train()
    assert tracker.calls == ["setup", *["write_logs"] * 4]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interruption_goes_through_a_tracker(tmp_path: Path, interruption: BaseException) -> None:
    tracker = NotingTracker("write_logs", interruption)
    trainer = quiet_trainer(tmp_path, given={"callbacks": [tracker]}, **LOGGED)
    with pytest.raises(type(interruption)):
        trainer.train()
    assert not tracker.has_failed


def test_a_tracker_hears_of_a_training_that_failed(tmp_path: Path) -> None:
    class Breaks(NotingTracker):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError("broken")

    tracker = Breaks()
    with pytest.raises(ZeroDivisionError):
        quiet_trainer(tmp_path, given={"callbacks": [tracker]}, **LOGGED).train()
    assert tracker.calls == ["setup", "end_failed_run: broken"]


def test_only_the_first_process_writes(tmp_path: Path) -> None:
    tracker = NotingTracker()
    trainer = quiet_trainer(tmp_path, given={"callbacks": [tracker]})
    trainer.state.is_world_process_zero = False
    trainer.log({"loss": 1.0})
    assert tracker.calls == ["setup"]


def test_hyperparameters_are_the_model_config_and_the_arguments_over_it_without_secrets(tmp_path: Path) -> None:
    args = quiet_arguments(
        tmp_path,
        hub_token="very secret",
        lr_scheduler_kwargs={"token": "very secret"},
        run_name="http://me:very-secret@h",
    )
    config = {"learning_rate": "of the config", "loader": {"API_KEY": "very secret"}, "pad_token": "<pad>"}
    shown = hyperparameters(args, SimpleNamespace(config=config, peft_config={"default": "lora"}))
    assert (shown["learning_rate"], shown["peft_config"]) == (0.01, {"default": "lora"})
    assert (shown["loader"], shown["pad_token"]) == ({"API_KEY": "<API_KEY>"}, "<pad>")
    assert (shown["lr_scheduler_kwargs"], shown["run_name"]) == ({"token": "<TOKEN>"}, "http://h")
    assert "very secret" not in str(shown)


NAMES = {
    "loss": 1.0,
    "eval_loss": 2.0,
    "eval_first_accuracy": 3.0,
    "test_runtime": 4.0,
    "train_loss": 5.0,
    "evaluation": 6.0,
    "eval_": 7.0,
}


def test_metrics_have_the_names_that_transformers_gives_them() -> None:
    from transformers.integrations.integration_utils import rewrite_logs

    assert with_tracked_names(NAMES) == rewrite_logs(NAMES)
    assert list(with_tracked_names({"eval_loss": 0, "loss": 0})) == ["eval/loss", "train/loss"]


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3),
        (0.5, 0.5),
        (True, True),
        (torch.tensor(1.5), 1.5),
        (torch.tensor([2]), 2),
        (np.float32(0.25), 0.25),
        (np.int64(7), 7),
        (np.array([4.0]), 4.0),
        ("text", None),
        (None, None),
        ([1.0], None),
        (torch.ones(2), None),
        (torch.tensor(1j), None),
        (np.array(["a"]), None),
        (int, None),
        (torch.tensor(float("nan")), float("nan")),
    ],
    ids=str,
)
def test_tensors_and_arrays_of_one_number_are_numbers(value: Any, number: Any) -> None:
    assert as_number(value) == number or (number != number and as_number(value) != as_number(value))


def test_what_is_no_number_is_named_once_for_each_service(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_warned", set())
    with caplog.at_level(logging.WARNING):
        for service in ("one", "one", "two"):
            assert only_numbers({"kept": 1, "matrix": [[1]]}, service) == {"kept": 1}
    assert [record.getMessage() for record in caplog.records] == [
        f"{service}: the logged value 'matrix' is left out, because it is a list and not a number: [[1]]."
        for service in ("one", "two")
    ]
