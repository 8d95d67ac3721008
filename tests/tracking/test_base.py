"""What the callbacks of all trackers share."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from littrainer.callbacks.base import EVENTS
from littrainer.callbacks.handler import listens_to
from littrainer.tracking import SERVICES, TrackerCallback, base
from littrainer.tracking.base import as_number, hyperparameters, only_numbers, survives_failure, with_tracked_names
from littrainer.tracking.selection import tracker_class
from littrainer.tracking.services import SwanLabCallback
from tests.scenarios.trainers import quiet_trainer

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


def test_a_run_is_set_up_once_and_each_log_is_written(tmp_path: Path) -> None:
    tracker = NotingTracker()
    trainer = quiet_trainer(tmp_path, given={"callbacks": [tracker]}, **LOGGED)
    trainer.train()
    trainer.predict(trainer.eval_dataset)
    assert tracker.calls == ["setup", *["write_logs"] * 4, "write_prediction_metrics"]


def test_an_evaluation_without_training_sets_the_run_up(tmp_path: Path) -> None:
    tracker = NotingTracker()
    quiet_trainer(tmp_path, given={"callbacks": [tracker]}).evaluate()
    assert tracker.calls == ["setup", "write_logs"]


@pytest.mark.parametrize("breaks_at", ["setup", "write_logs"])
def test_a_failure_is_told_once_with_service_and_cause_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, breaks_at: str
) -> None:
    tracker = NotingTracker(breaks_at)
    trainer = quiet_trainer(tmp_path, given={"callbacks": [tracker]}, **LOGGED)
    with caplog.at_level(logging.WARNING, "littrainer"):
        assert trainer.train().global_step == 3
        trainer.evaluate()
    assert [record.getMessage() for record in caplog.records if "Reporting" in record.getMessage()] == [
        "Reporting to NotingTracker failed (ConnectionError: no route). Training goes on, and nothing more is reported "
        "there."
    ]
    assert tracker.has_failed
    assert tracker.calls[-2:] == [breaks_at, "release"]


def test_the_next_training_tries_a_tracker_that_failed_again_and_tells_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = NotingTracker("setup")
    trainer = quiet_trainer(tmp_path, given={"callbacks": [tracker]}, **LOGGED)
    trainer.train()
    trainer.train()
    assert tracker.calls == ["setup", "release"] * 2
    assert caplog.text.count("Reporting to NotingTracker failed") == 2
    tracker.breaks_at = ""
    trainer.train()
    assert tracker.calls[4:] == ["setup", *["write_logs"] * 4]


def test_an_error_in_letting_go_of_a_run_is_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class HoldsOn(NotingTracker):
        def release(self) -> None:
            raise OSError("cannot let go")

    assert quiet_trainer(tmp_path, given={"callbacks": [HoldsOn("setup")]}, **LOGGED).train().global_step == 3
    assert "cannot let go" not in caplog.text


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


def test_setup_of_a_subclass_gets_the_keywords_that_it_takes(tmp_path: Path) -> None:
    class Named(NotingTracker):
        def setup(self, args: Any, state: Any, model: Any, optimizer: Any) -> None:  # type: ignore[override]
            self.note(type(optimizer).__name__)

    tracker = Named()
    quiet_trainer(tmp_path, given={"callbacks": [tracker]}, max_steps=1).train()
    assert tracker.calls[0] == "AdamW"


def test_only_the_first_process_writes(tmp_path: Path) -> None:
    tracker = NotingTracker()
    trainer = quiet_trainer(tmp_path, given={"callbacks": [tracker]})
    trainer.state.is_world_process_zero = False
    trainer.log({"loss": 1.0})
    assert tracker.calls == ["setup"]


def test_hyperparameters_are_the_model_config_and_the_arguments_over_it(tmp_path: Path) -> None:
    config = {"hidden_size": 8, "learning_rate": "of the config"}
    model = SimpleNamespace(config=config, peft_config={"default": "lora"})
    shown = hyperparameters(quiet_trainer(tmp_path, hub_token="very secret").args, model)
    assert (shown["hidden_size"], shown["learning_rate"]) == (8, 0.01)
    assert shown["peft_config"] == {"default": "lora"}
    assert "very secret" not in str(shown)


def test_secrets_are_masked_in_nested_arguments_and_in_the_model_config(tmp_path: Path) -> None:
    args = quiet_trainer(
        tmp_path, lr_scheduler_kwargs={"token": "very secret"}, run_name="http://me:very-secret@h"
    ).args
    shown = hyperparameters(args, SimpleNamespace(config={"loader": {"API_KEY": "very secret"}, "pad_token": "<pad>"}))
    assert shown["lr_scheduler_kwargs"] == {"token": "<TOKEN>"}
    assert (shown["loader"], shown["pad_token"]) == ({"API_KEY": "<API_KEY>"}, "<pad>")
    assert shown["run_name"] == "http://h"


def test_no_tracker_listens_to_what_happens_at_each_step() -> None:
    at_each_step = [name for name in EVENTS if "step" in name]
    for name in ("tensorboard", "wandb", "mlflow", "trackio"):
        callback = tracker_class(name)()
        assert not [event for event in at_each_step if listens_to(callback, event)]
    assert set(SERVICES) >= {"tensorboard", "wandb", "mlflow", "trackio"}


def test_a_wrapped_event_keeps_its_name_and_documentation() -> None:
    def on_save(self: Any) -> None:
        """Saved."""

    assert (survives_failure(on_save).__name__, survives_failure(on_save).__doc__) == ("on_save", "Saved.")


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
    monkeypatch.setattr(base, "_told", set())
    with caplog.at_level(logging.WARNING):
        for service in ("one", "one", "two"):
            assert only_numbers({"kept": 1, "matrix": [[1]]}, service) == {"kept": 1}
    assert [record.getMessage() for record in caplog.records] == [
        f"{service}: the logged value 'matrix' is left out, since it is a list and no number: [[1]]."
        for service in ("one", "two")
    ]


def badge(log_model: str | None, run: Any) -> str | None:
    """What the callback says of a run, without SwanLab, which it asks for when it is made."""
    callback = SwanLabCallback.__new__(SwanLabCallback)
    callback._swanlab, callback._log_model = SimpleNamespace(get_run=lambda: run), log_model
    return callback.card_badge()


def test_a_badge_links_to_a_run_in_the_cloud_where_the_environment_asks_for_it() -> None:
    address = "https://swanlab.cn/@me/mine/runs/1"
    run = SimpleNamespace(public=SimpleNamespace(cloud=SimpleNamespace(experiment_url=address)))
    assert str(badge("checkpoint", run)).endswith(f"({address})")
    assert badge(None, run) is None
    assert badge("checkpoint", None) is None
    assert badge("checkpoint", SimpleNamespace(public=None)) is None
