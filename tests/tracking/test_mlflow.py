import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow.tracking import MlflowClient

from littrainer import Trainer, TrainerCallback
from littrainer.tracking import MLflowCallback
from tests.scenarios.trainers import quiet_trainer
from tests.tracking.stores import list_runs, mlflow_store


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowClient]:
    with mlflow_store(tmp_path, monkeypatch) as client:
        yield client


@pytest.fixture
def train_at(tmp_path: Path, store: MlflowClient) -> Any:
    """Return a function that trains, calls `at_step` before each step, and returns the Trainer."""

    def train(steps: int = 1, at_step: Any = None, **changes: Any) -> Trainer:
        class Acting(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if at_step is not None:
                    at_step()

        logged = {"logging_strategy": "steps", "logging_steps": 1, "max_steps": steps, **changes}
        trainer = quiet_trainer(
            tmp_path / "out", report_to="mlflow", trainer_kwargs={"callbacks": [Acting()]}, **logged
        )
        trainer.train()
        return trainer

    return train


@pytest.mark.parametrize(("error", "status"), [(ZeroDivisionError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_a_failed_training_ends_its_run_as_failed(
    store: MlflowClient, train_at: Any, error: type[BaseException], status: str
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(error):
        train_at(at_step=fail)
    assert [run.info.status for run in list_runs(store)] == [status]
    assert mlflow.active_run() is None


def test_an_evaluation_after_training_uses_its_run_and_a_second_training_starts_another(
    store: MlflowClient, train_at: Any
) -> None:
    trainer = train_at()
    trainer.evaluate()
    (first,) = list_runs(store)
    assert "eval_loss" in first.data.metrics
    trainer.train()
    assert [run.info.status for run in list_runs(store)] == ["FINISHED"] * 2


def test_the_environment_continues_a_run_and_sets_tags_limits_and_artifacts(
    store: MlflowClient, train_at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = store.get_experiment_by_name("trials")
    run_id = store.create_run(experiment.experiment_id).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    monkeypatch.setenv("MLFLOW_TAGS", json.dumps({"release": "RC1"}))
    monkeypatch.setenv("MLFLOW_MAX_LOG_PARAMS", "3")
    monkeypatch.setenv("HF_MLFLOW_LOG_ARTIFACTS", "true")
    train_at(save_strategy="steps", save_steps=1)
    (run,) = list_runs(store)
    assert run.info.run_id == run_id
    assert run.data.tags["release"] == "RC1"
    assert len(run.data.params) == 3
    names = {file.path for file in store.list_artifacts(run_id, "checkpoint-1")}
    assert "checkpoint-1/trainer_state.json" in names


def test_an_active_run_stays_open_or_is_the_parent_of_a_nested_run(
    store: MlflowClient, train_at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "TRUE")
    mlflow.set_experiment("trials")
    with mlflow.start_run() as parent:
        train_at()
        monkeypatch.delenv("MLFLOW_NESTED_RUN")
        monkeypatch.setenv("MLFLOW_FLATTEN_PARAMS", "1")
        train_at().log({"recall(at 5)": 0.5})
        assert mlflow.active_run().info.run_id == parent.info.run_id
    parent, child = list_runs(store)
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert parent.data.params["accelerator_config.split_batches"] == "False"
    assert parent.data.metrics["recall_at 5_"] == 0.5


def test_an_error_says_how_mlflow_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISABLE_MLFLOW_INTEGRATION", "TRUE")
    with pytest.raises(ImportError, match="DISABLE_MLFLOW_INTEGRATION"):
        MLflowCallback()
