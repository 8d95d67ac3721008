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
from tests.tracking.stores import mlflow_store, runs_in


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowClient]:
    with mlflow_store(tmp_path, monkeypatch) as client:
        yield client


@pytest.fixture
def trained(tmp_path: Path, store: MlflowClient) -> Any:
    """Trains for a step, and gives the Trainer; `at_step` is called at each one before."""

    def train(steps: int = 1, at_step: Any = None, **changes: Any) -> Trainer:
        class Acts(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if at_step is not None:
                    at_step()

        logged = {"logging_strategy": "steps", "logging_steps": 1, "max_steps": steps, **changes}
        trainer = quiet_trainer(tmp_path / "out", report_to="mlflow", given={"callbacks": [Acts()]}, **logged)
        trainer.train()
        return trainer

    return train


@pytest.mark.parametrize(("error", "status"), [(ZeroDivisionError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_a_training_that_fails_leaves_a_run_that_failed(
    store: MlflowClient, trained: Any, error: type[BaseException], status: str
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(error):
        trained(at_step=fail)
    assert [run.info.status for run in runs_in(store)] == [status]
    assert mlflow.active_run() is None


def test_an_evaluation_after_training_belongs_to_its_run_and_a_second_training_has_its_own(
    store: MlflowClient, trained: Any
) -> None:
    trainer = trained()
    trainer.evaluate()
    (first,) = runs_in(store)
    assert "eval_loss" in first.data.metrics
    trainer.train()
    assert [run.info.status for run in runs_in(store)] == ["FINISHED"] * 2


def test_the_environment_continues_a_run_and_sets_tags_limits_and_artifacts(
    store: MlflowClient, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = store.get_experiment_by_name("trials")
    known = store.create_run(experiment.experiment_id).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", known)
    monkeypatch.setenv("MLFLOW_TAGS", json.dumps({"release": "RC1"}))
    monkeypatch.setenv("MLFLOW_MAX_LOG_PARAMS", "3")
    monkeypatch.setenv("HF_MLFLOW_LOG_ARTIFACTS", "true")
    trained(save_strategy="steps", save_steps=1)
    (run,) = runs_in(store)
    assert run.info.run_id == known
    assert run.data.tags["release"] == "RC1"
    assert len(run.data.params) == 3
    names = {file.path for file in store.list_artifacts(known, "checkpoint-1")}
    assert "checkpoint-1/trainer_state.json" in names


def test_an_active_run_is_used_and_left_open_or_the_parent_of_a_nested_one(
    store: MlflowClient, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "TRUE")
    mlflow.set_experiment("trials")
    with mlflow.start_run() as parent:
        trained()
        monkeypatch.delenv("MLFLOW_NESTED_RUN")
        monkeypatch.setenv("MLFLOW_FLATTEN_PARAMS", "1")
        trained().log({"recall(at 5)": 0.5})
        assert mlflow.active_run().info.run_id == parent.info.run_id
    parent, child = runs_in(store)
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert parent.data.params["accelerator_config.split_batches"] == "False"
    assert parent.data.metrics["recall_at 5_"] == 0.5


def test_mlflow_that_is_switched_off_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISABLE_MLFLOW_INTEGRATION", "TRUE")
    with pytest.raises(ImportError, match="DISABLE_MLFLOW_INTEGRATION"):
        MLflowCallback()
