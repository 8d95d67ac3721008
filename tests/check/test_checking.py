from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from littrainer import Trainer, TrainerCallback
from littrainer.check import checking
from littrainer.check.findings import FAILS, NOTE, PASSED, CheckReport
from littrainer.tracking.base import TrackerCallback
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import NoisyClassifier, VectorClassifier
from tests.scenarios.trainers import quiet_trainer

SAVES = {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "steps", "logging_steps": 1}


def failures(report: CheckReport) -> list[str]:
    return [f"{finding.about}: {finding.text}" for finding in report.findings if finding.status == FAILS]


class Counts(TrainerCallback):
    """Callback that records its events in a list, and saves in a nested list."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.counts: dict[str, list[int]] = {"saves": []}

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append("on_evaluate")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append("on_save")
        self.counts["saves"].append(state.global_step)


class AugmentedRows(Rows):
    """Rows with a random augmentation."""

    def __getitem__(self, index: int) -> Any:
        row = super().__getitem__(index)
        return {**row, "x": row["x"] + torch.rand(())}


@pytest.mark.parametrize("optimizer", [False, True], ids=["default optimizer", "user's optimizer"])
def test_a_check_changes_neither_numbers_nor_files_of_the_training(tmp_path: Path, optimizer: bool) -> None:
    trained = {}
    for name in ("without", "with"):
        torch.manual_seed(0)
        model, callback = NoisyClassifier(), Counts()
        kwargs: dict[str, Any] = {"callbacks": [callback], "train_dataset": AugmentedRows(vector_rows(12))}
        if optimizer:
            kwargs["optimizers"] = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None)
        trainer = quiet_trainer(
            tmp_path / name, model, trainer_kwargs=kwargs, **SAVES, load_best_model_at_end=True, num_train_epochs=2
        )
        before = dict(vars(trainer.args))
        if name == "with":
            report = trainer.check()
            assert report.ok, report
            assert vars(trainer.args) == before and callback.events == callback.counts["saves"] == []
            assert {path.name for path in tmp_path.iterdir()} == {"without", "with"}
            assert [*(tmp_path / "with").iterdir()] == []
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        files = [path.name for path in (tmp_path / name).rglob("*")]
        trained[name] = losses, [weight.tolist() for weight in model.parameters()], files, callback.events
    assert trained["with"][:2] == trained["without"][:2] and sorted(trained["with"][2]) == sorted(trained["without"][2])
    assert trained["with"][3] == trained["without"][3] != []


def test_the_report_lists_what_passed_and_forecasts_time_and_memory(tmp_path: Path) -> None:
    report = quiet_trainer(tmp_path / "run", rows=41, load_best_model_at_end=True, **SAVES).check()
    page = str(report)
    for line in (
        "passed     train_dataset: 41 of 41 rows looked at",
        "passed     evaluation: it gives eval_loss",
        "passed     save: a checkpoint was written and verified",
        "passed     resume: the next loss is the same",
        "passed     longest batch",
        "the best model was loaded",
        "33 steps, 3 evaluations and 3 saves take",
        "Nothing was found that would fail.",
    ):
        assert line in page, (line, page)
    assert report.forecast_seconds is not None and report.forecast_seconds > 0
    assert report.forecast_bytes is not None and report.forecast_bytes > 1e7


def test_a_callback_that_stops_early_does_not_end_the_forecast(tmp_path: Path) -> None:
    class Stops(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True

        on_train_begin = on_epoch_end = on_evaluate

    report = quiet_trainer(tmp_path, rows=41, trainer_kwargs={"callbacks": [Stops()]}, **SAVES).check()
    assert "33 steps, 3 evaluations and 3 saves take" in str(report)


def test_a_training_without_steps_has_a_note(tmp_path: Path) -> None:
    report = quiet_trainer(tmp_path, num_train_epochs=0).check()
    assert report.ok and "the training ends before the first one" in str(report)


def test_intervals_in_minutes_are_tried_and_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minutes = {"max_minutes": 1e-4, "save_minutes": 1e-5, "save_strategy": "no"}
    # The parent of output_dir is not writable.
    monkeypatch.setattr(checking.os, "access", lambda path, mode: path != tmp_path)
    report = quiet_trainer(tmp_path / "run", **minutes).check()
    assert "passed     save: " in str(report) and "since max_minutes ends them early" in str(report)
    assert report.forecast_seconds == pytest.approx(0.006)
    assert [path.name for path in tmp_path.rglob("*")] == ["run"]


def test_trackers_start_no_run(tmp_path: Path) -> None:
    class Service(TrackerCallback):
        calls: ClassVar[list[str]] = []

        def __init__(self) -> None:
            self.service = "a service"

        def start_run(self, args: Any, state: Any, model: Any) -> None:
            self.calls.append("start")

    report = quiet_trainer(tmp_path / "run", trainer_kwargs={"callbacks": [Service()]}, **SAVES).check()
    assert Service.calls == []
    (finding,) = [finding for finding in report.findings if finding.about == "a service"]
    assert finding.status == PASSED and finding.text.endswith("no run was started")


def test_metrics_that_require_all_rows_get_all_rows(tmp_path: Path) -> None:
    rows = Rows(vector_rows(200, seed=1))
    expected = np.array([int(row["labels"]) for row in rows])

    def accuracy(prediction: Any) -> dict[str, float]:
        return {"accuracy": float((prediction.predictions.argmax(-1) == expected).mean())}

    kwargs = {"eval_dataset": rows, "compute_metrics": accuracy}
    assert failures(quiet_trainer(tmp_path / "a", trainer_kwargs=kwargs, **SAVES).check()) == []
    kwargs["compute_metrics"] = lambda prediction: {"accuracy": (prediction.predictions[0] == expected)[3, 3]}
    assert failures(quiet_trainer(tmp_path / "b", trainer_kwargs=kwargs, **SAVES).check())[0].startswith("evaluation: ")


def test_each_failing_part_is_reported_with_its_step(tmp_path: Path) -> None:
    class Breaks(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise OSError("no such host")

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise RuntimeError("nothing to report")

    arguments = {**SAVES, "metric_for_best_model": "f1", "load_best_model_at_end": True, "num_train_epochs": 2}
    report = quiet_trainer(tmp_path / "run", trainer_kwargs={"callbacks": [Breaks()]}, **arguments).check()
    assert [(finding.about, finding.when) for finding in report.failures] == [
        ("evaluation", "at optimizer step 3 of 6"),
        ("save", "at optimizer step 3 of 6"),
        ("end of training", "when all steps are done"),
    ]
    assert not report.ok and re.search(r"^3 of \d checks failed\.$", str(report), re.MULTILINE)


def test_arguments_that_train_refuses_fail(tmp_path: Path) -> None:
    kwargs = {"eval_dataset": {"news": vector_rows(9), "mail": vector_rows(9)}}
    arguments = {**SAVES, "load_best_model_at_end": True, "metric_for_best_model": "eval_acc"}
    (failure,) = failures(quiet_trainer(tmp_path, trainer_kwargs=kwargs, **arguments).check())
    assert failure.startswith("arguments: KeyError: ") and "'eval_news_acc'" in failure


def test_a_manual_save_is_tried(tmp_path: Path) -> None:
    class Unsaved:
        def save_pretrained(self, folder: str, **kwargs: Any) -> None:
            raise TypeError("not serializable")

    report = quiet_trainer(tmp_path, trainer_kwargs={"processing_class": Unsaved()}, save_strategy="no").check()
    (finding,) = report.failures
    assert finding.about == "save" and finding.when == "at a call of save_model()"


def test_a_check_within_a_training_is_refused(tmp_path: Path) -> None:
    class Checks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.check()

    trainer = quiet_trainer(tmp_path, trainer_kwargs={"callbacks": [Checks()]})
    with pytest.raises(RuntimeError, match="call it before train"):
        trainer.train()


def test_streams_and_custom_loaders_have_notes_about_untested_parts(tmp_path: Path) -> None:
    from tests.scenarios.data import Stream

    class CustomLoaders(Trainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, batch_size=4)

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return DataLoader(self.eval_dataset, batch_size=4)

    streams = {"train_dataset": Stream(vector_rows(40)), "eval_dataset": Stream(vector_rows(9, seed=1))}
    for kind, kwargs, notes in (
        (Trainer, streams, ["train_dataset", "eval_dataset", "evaluation"]),
        (CustomLoaders, {}, ["evaluation", "longest batch"]),
    ):
        report = quiet_trainer(
            tmp_path, VectorClassifier(), trainer_kwargs=kwargs, kind=kind, max_steps=8, **SAVES
        ).check()
        assert report.ok, report
        assert [finding.about for finding in report.findings if finding.status == NOTE] == notes
