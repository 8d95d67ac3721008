import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow.tracking import MlflowClient

from littrainer import TrainerCallback
from littrainer.tracking import MLflowCallback
from tests.scenarios.trainers import quiet_trainer
from tests.tracking.stores import mlflow_store, runs_in


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowClient]:
    with mlflow_store(tmp_path, monkeypatch) as client:
        yield client


class Breaks(TrainerCallback):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "status"), [(ZeroDivisionError("broken"), "FAILED"), (KeyboardInterrupt(), "KILLED")]
)
def test_a_training_that_fails_leaves_a_run_that_failed(
    tmp_path: Path, store: MlflowClient, error: BaseException, status: str
) -> None:
    trainer = quiet_trainer(tmp_path / "out", report_to="mlflow", max_steps=2, given={"callbacks": [Breaks(error)]})
    with pytest.raises(type(error)):
        trainer.train()
    assert [run.info.status for run in runs_in(store)] == [status]
    assert mlflow.active_run() is None


def test_an_evaluation_after_training_belongs_to_its_run_and_a_second_training_has_its_own(
    tmp_path: Path, store: MlflowClient
) -> None:
    trainer = quiet_trainer(tmp_path / "out", report_to="mlflow", max_steps=1)
    trainer.train()
    trainer.evaluate()
    (first,) = runs_in(store)
    assert "eval_loss" in first.data.metrics
    trainer.train()
    first, second = runs_in(store)
    assert first.info.status == second.info.status == "FINISHED"
    assert second.data.params["max_steps"] == "1"


def test_the_environment_continues_a_run_and_sets_tags_limits_and_artifacts(
    tmp_path: Path, store: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = store.get_experiment_by_name("trials")
    known = store.create_run(experiment.experiment_id).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", known)
    monkeypatch.setenv("MLFLOW_TAGS", json.dumps({"release": "RC1"}))
    monkeypatch.setenv("MLFLOW_MAX_LOG_PARAMS", "3")
    monkeypatch.setenv("HF_MLFLOW_LOG_ARTIFACTS", "true")
    quiet_trainer(tmp_path / "out", report_to="mlflow", max_steps=1, save_strategy="steps", save_steps=1).train()
    (run,) = runs_in(store)
    assert run.info.run_id == known
    assert run.data.tags["release"] == "RC1"
    assert len(run.data.params) == 3
    names = {file.path for file in store.list_artifacts(known, "checkpoint-1")}
    assert "checkpoint-1/trainer_state.json" in names


def test_an_active_run_is_used_and_left_open_or_the_parent_of_a_nested_one(
    tmp_path: Path, store: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "TRUE")
    mlflow.set_experiment("trials")
    with mlflow.start_run() as parent:
        quiet_trainer(tmp_path / "out", report_to="mlflow", max_steps=1).train()
        monkeypatch.delenv("MLFLOW_NESTED_RUN")
        monkeypatch.setenv("MLFLOW_FLATTEN_PARAMS", "1")
        trainer = quiet_trainer(tmp_path / "out", report_to="mlflow", max_steps=1)
        trainer.train()
        trainer.log({"recall(at 5)": 0.5})
        assert mlflow.active_run().info.run_id == parent.info.run_id
    parent, child = runs_in(store)
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert parent.data.params["accelerator_config.split_batches"] == "False"
    assert parent.data.metrics["recall_at 5_"] == 0.5


def test_a_store_that_breaks_during_training_is_told_once_and_training_goes_on(
    tmp_path: Path, store: MlflowClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StoreBreaks(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            (tmp_path / "mlflow.db").write_bytes(b"no database" * 999)

    trainer = quiet_trainer(
        tmp_path / "out",
        report_to="mlflow",
        max_steps=3,
        logging_strategy="steps",
        logging_steps=1,
        given={"callbacks": [StoreBreaks()]},
    )
    assert trainer.train().global_step == 3
    told = [record for record in caplog.records if "Reporting to mlflow failed" in record.getMessage()]
    assert len(told) == 1


def test_mlflow_that_is_switched_off_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISABLE_MLFLOW_INTEGRATION", "TRUE")
    with pytest.raises(ImportError, match="DISABLE_MLFLOW_INTEGRATION"):
        MLflowCallback()
