"""Hooks, metrics and logging of user-defined Lightning callbacks in a Trainer."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from littrainer import Trainer, TrainerCallback
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

BOTH_MODES = pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer])
STEP = [
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
]
# A Trainer has no `test` stage and no sanity check.
NEVER_CALLED = ("on_test", "on_sanity_check")


class Hooks(pl.Callback):
    """Callback that records each hook, and the module's model."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.models: set[int] = set()

    def __getattribute__(self, name: str) -> Any:
        attribute = super().__getattribute__(name)
        if name not in HOOKS:
            return attribute

        def record_and_call(trainer: pl.Trainer, module: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            self.models.add(id(module.model))
            return attribute(trainer, module, *args, **kwargs)

        return record_and_call


HOOKS = {name for name in vars(pl.Callback) if name.startswith("on_") or name in ("setup", "teardown")}


@BOTH_MODES
def test_all_hooks_of_a_training_are_called_in_lightnings_order(tmp_path: Path, kind: Any) -> None:
    hooks = Hooks()
    trainer = quiet_trainer(
        tmp_path,
        kind=kind,
        trainer_kwargs={"callbacks": [hooks], "eval_dataset": Rows(vector_rows(3))},
        max_steps=1,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=1,
        save_steps=1,
    )
    trainer.train()
    begin = ["setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start"]
    validation = [
        f"on_validation_{name}" for name in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
    ]
    end = ["on_train_epoch_end", "on_train_end", "on_fit_end", "teardown"]
    step = [name for name in hooks.calls if name in STEP]
    assert [name for name in hooks.calls if name not in STEP[1:]] == [
        *begin,
        "on_train_batch_end",
        *validation,
        "on_save_checkpoint",
        *end,
    ]
    assert sorted(step) == sorted(STEP) if kind is Trainer else set(step) <= set(STEP)
    assert hooks.models == {id(trainer.model)}


def test_all_other_hooks_are_called_too(tmp_path: Path) -> None:
    class Failing(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise OverflowError

    hooks = Hooks()
    trainer = quiet_trainer(
        tmp_path, trainer_kwargs={"callbacks": [hooks]}, max_steps=1, save_strategy="steps", save_steps=1
    )
    trainer.train()
    trainer.args.max_steps = 2
    trainer.train(resume_from_checkpoint=True)
    trainer.evaluate()
    trainer.predict(Rows(vector_rows(3)))
    trainer.add_callback(Failing)
    with pytest.raises(OverflowError):
        trainer.train()
    assert {name for name in HOOKS if not name.startswith(NEVER_CALLED)} == set(hooks.calls)


class Metrics(pl.Callback):
    def __init__(self) -> None:
        self.at: dict[str, dict[str, float]] = {}

    def note(self, hook: str, trainer: pl.Trainer) -> None:
        self.at[hook] = {name: value.item() for name, value in trainer.callback_metrics.items()}

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.note("validation", trainer)

    def on_predict_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.note("prediction", trainer)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.note("training", trainer)
        assert set(trainer.logged_metrics) == set(trainer.callback_metrics)
        assert set(trainer.progress_bar_metrics) == {"loss", "learning_rate", "eval_loss"}


@BOTH_MODES
def test_logs_of_the_trainer_are_in_lightnings_callback_metrics(tmp_path: Path, kind: Any) -> None:
    metrics = Metrics()
    kwargs = {"callbacks": [metrics], "compute_metrics": accuracy}
    steps: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "logging_strategy": "steps", "logging_steps": 1}
    trainer = quiet_trainer(tmp_path, kind=kind, trainer_kwargs=kwargs, max_steps=2, **steps)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if entry["step"] == 2 and "train_loss" not in entry]
    logged = {name: value for entry in entries for name, value in entry.items() if name not in ("epoch", "step")}
    assert metrics.at["validation"] == metrics.at["training"] == logged
    assert {"loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "eval_runtime"} <= set(logged)


def test_evaluations_and_predictions_outside_of_training_have_metrics_and_outputs_too(tmp_path: Path) -> None:
    outputs: list[Any] = []

    class RecordsOutputs(pl.Callback):
        def on_validation_batch_end(self, trainer: pl.Trainer, module: Any, output: Any, *_: Any) -> None:
            outputs.append(output)

    metrics = Metrics()
    trainer = quiet_trainer(
        tmp_path, trainer_kwargs={"callbacks": [metrics, RecordsOutputs()], "compute_metrics": accuracy}
    )
    evaluated = trainer.evaluate()
    predicted = trainer.predict(trainer.eval_dataset)
    for name in ("loss", "accuracy"):
        assert metrics.at["validation"][f"eval_{name}"] == evaluated[f"eval_{name}"]
        assert metrics.at["prediction"][f"test_{name}"] == predicted.metrics[f"test_{name}"]
    assert torch.equal(torch.cat([output["predictions"] for output in outputs]), torch.tensor(predicted.predictions))
    assert torch.equal(torch.cat([output["labels"] for output in outputs]), torch.tensor(predicted.label_ids))


def read_rows(folder: str) -> list[dict[str, str]]:
    with (Path(folder) / "metrics.csv").open() as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.mark.parametrize("through", ["trainer", "report_to"])
def test_a_lightning_logger_gets_what_the_trainer_and_its_lightning_callbacks_log(tmp_path: Path, through: str) -> None:
    logger = CSVLogger(str(tmp_path / "logs"))
    logging_steps: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 1, "max_steps": 2}
    kwargs: dict[str, Any] = {"callbacks": [LearningRateMonitor()]}
    if through == "trainer":
        kwargs["lightning"] = {"logger": logger}
    else:
        logging_steps["report_to"] = logger
    trainer = quiet_trainer(tmp_path, trainer_kwargs=kwargs, **logging_steps)
    trainer.train()
    rows = read_rows(logger.log_dir)
    rates = [(row["step"], float(row["lr-AdamW/pg1"])) for row in rows if "lr-AdamW/pg1" in row]
    losses = [(row["step"], float(row["train/loss"])) for row in rows if "train/loss" in row]
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert losses == [(str(entry["step"]), entry["loss"]) for entry in history]
    assert rates == [(str(entry["step"] - 1), entry["learning_rate"]) for entry in history]
    assert not any("lr-AdamW/pg1" in entry for entry in trainer.state.log_history)


class LogsMetrics(pl.Callback):
    """Callback that logs by the module, as usual in Lightning."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.log("custom/loss", outputs["loss"], logger=True)

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        module.log("val_custom", float(trainer.global_step), logger=True)


@BOTH_MODES
def test_metrics_logged_by_a_lightning_callback_are_in_the_history_without_a_tracker(tmp_path: Path, kind: Any) -> None:
    changes: dict[str, Any] = {"max_steps": 2, "logging_strategy": "steps", "logging_steps": 1}
    evaluated: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2}
    trainer = quiet_trainer(tmp_path, kind=kind, trainer_kwargs={"callbacks": [LogsMetrics()]}, **changes, **evaluated)
    trainer.train()
    history = trainer.state.log_history
    losses = [(entry["step"], entry["custom/loss"]) for entry in history if "custom/loss" in entry]
    assert losses == [(entry["step"], pytest.approx(entry["loss"])) for entry in history if "loss" in entry]
    assert [(entry["step"], entry["val_custom"]) for entry in history if "val_custom" in entry] == [(2, 2.0)]
    without = quiet_trainer(tmp_path, kind=kind, **changes, **evaluated)
    without.train()
    for name in ("loss", "grad_norm", "eval_loss"):
        numbers = [[entry[name] for entry in t.state.log_history if name in entry] for t in (trainer, without)]
        assert numbers[0] == numbers[1] != []


def test_logger_true_is_lightnings_default_logger(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, trainer_kwargs={"lightning": {"logger": True}}, max_steps=1)
    trainer.train()
    assert trainer.lightning_trainer is not None
    assert [type(logger).__name__ for logger in trainer.lightning_trainer.loggers] == ["SharedLogger"]
    assert isinstance(trainer.lightning_trainer.loggers[0]._tracker.lightning_logger, (TensorBoardLogger, CSVLogger))
    assert list((tmp_path / "lightning_logs" / "version_0").iterdir())


def test_a_callback_that_logs_images_without_a_tracker_is_warned_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Draws(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            logger: Any = trainer.logger
            logger.experiment.add_image("weights", torch.zeros(1, 2, 2))

    quiet_trainer(tmp_path, trainer_kwargs={"callbacks": [Draws()]}, max_steps=3).train()
    assert caplog.text.count("no tracker is there") == 1
    caplog.clear()
    quiet_trainer(tmp_path, trainer_kwargs={"callbacks": [LearningRateMonitor()]}, max_steps=3).train()
    assert caplog.text == ""
