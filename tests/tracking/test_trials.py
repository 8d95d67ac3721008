"""Each trial of a search has a separate run in each tracker, with the trial's status."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import optuna
import pytest
import wandb
from trackio.sqlite_storage import SQLiteStorage

from littrainer import TrainerCallback
from tests.scenarios.models import tiny_bert_classifier
from tests.scenarios.pruners import prunes_the_second_trial
from tests.tracking.both_sides import SIDES, make_trainer
from tests.tracking.stores import SERVICES, list_runs, read_events, read_rows, redirect_store, wait_for_runs

TRIALS = ["run-0", "run-1", "run-2"]


def search(side: str, folder: Path, hp_name: Any = None, **changes: Any) -> Any:
    """Search over three trials, of which the second is pruned at its first evaluation; return the Trainer."""
    trainer = make_trainer(side, folder, model_init=lambda: tiny_bert_classifier(), **changes)
    trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-1)},
        n_trials=3,
        backend="optuna",
        hp_name=hp_name,
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=prunes_the_second_trial(),
    )
    return trainer


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return each side's records of trials that the script has named."""
    by_side = {}
    for side in SIDES:
        folder = tmp_path_factory.mktemp(side)
        with redirect_store(folder):
            search(side, folder / "out", lambda trial: f"try-{trial.number}", report_to=["tensorboard", "wandb"])
            wandb.finish()
            by_side[side] = {
                "events": {path.name: read_events(path)["scalars"] for path in folder.glob("out/runs/*/*")},
                "wandb": wait_for_runs(folder, "try-0", "try-1", "try-2"),
            }
    return by_side


def test_named_trials_have_the_same_runs_as_with_transformers(records: dict[str, dict[str, Any]]) -> None:
    theirs, ours = (records[side] for side in SIDES)
    assert theirs["events"].keys() == ours["events"].keys() == ours["wandb"].keys()
    for trial in ours["wandb"]:
        assert ours["events"][trial]["train/loss"] == theirs["events"][trial]["train/loss"]
        assert ours["events"][trial]["eval/loss"] == theirs["events"][trial]["eval/loss"]
        their_run, our_run = theirs["wandb"][trial], ours["wandb"][trial]
        assert [row["train/global_step"] for row in our_run.history] == [
            row["train/global_step"] for row in their_run.history
        ]
        assert our_run.config["learning_rate"] == their_run.config["learning_rate"]
        assert (our_run.project, our_run.exit_code) == (their_run.project, 0)
        assert Path(our_run.group).name == Path(their_run.group).name == "out"


def test_unnamed_trials_have_the_names_of_their_folders_and_a_later_training_has_a_new_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The callback for Weights & Biases resets run_name.
    services = [name for name in SERVICES if name != "wandb"]
    with redirect_store(tmp_path) as client:
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
        trainer = search("littrainer", tmp_path / "out", report_to=services, project="records", run_name="mine")
        assert mlflow.active_run() is None
        runs = list_runs(client)
        assert [run.info.run_name for run in runs] == [f"mine-{name}" for name in TRIALS]
        assert {run.info.status for run in runs} == {"FINISHED"}
        assert len({run.data.params["learning_rate"] for run in runs}) == 3
        assert sorted(SQLiteStorage.get_runs("records")) == [f"mine-{name}" for name in TRIALS]
        assert [row["train/global_step"] for row in read_rows("records", "mine-run-1")] == [2, 3]
        assert sorted(path.name for path in (tmp_path / "events").iterdir() if path.is_dir()) == TRIALS
        trainer.train()
        assert list_runs(client)[-1].info.run_name == "mine" in SQLiteStorage.get_runs("records")
        for folder in (tmp_path / "events", tmp_path / "events" / "run-2"):
            assert [step for step, _ in read_events(folder)["scalars"]["eval/loss"]] == [3, 6]


def test_a_failed_trial_ends_its_run_as_failed(tmp_path: Path) -> None:
    class Failing(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.trial_params is not None and state.trial_params["learning_rate"] == 0.02:
                raise ZeroDivisionError("broken")

    with redirect_store(tmp_path) as client:
        services = {"report_to": ["wandb", "mlflow"], "run_name": "after"}
        trainer = make_trainer("littrainer", tmp_path / "out", model_init=lambda: tiny_bert_classifier(), **services)
        trainer.add_callback(Failing())
        rates = iter([0.02, 0.03])
        trainer.hyperparameter_search(
            lambda trial: {"learning_rate": trial.suggest_float("learning_rate", rate := next(rates), rate)},
            n_trials=2,
            backend="optuna",
            catch=(ZeroDivisionError,),
        )
        trainer.train()
        wandb.finish()
        runs = wait_for_runs(tmp_path, "run-0", "run-1", "after")
        assert {name: run.exit_code for name, run in runs.items()} == {"run-0": 1, "run-1": 0, "after": 0}
        assert runs["after"].config["learning_rate"] == 0.01
        assert [run.info.status for run in list_runs(client)] == ["FAILED", "FINISHED", "FINISHED"]


def test_the_environment_nests_trials_in_a_run_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with redirect_store(tmp_path) as client:
        monkeypatch.setenv("MLFLOW_NESTED_RUN", "true")
        mlflow.set_experiment("trials")
        mine = mlflow.start_run(run_name="search")
        search("littrainer", tmp_path / "out", report_to="mlflow", run_name=None)
        active = mlflow.active_run()
        assert active is not None and active.info.run_id == mine.info.run_id
        parents = {run.info.run_name: run.data.tags.get("mlflow.parentRunId") for run in list_runs(client)}
    assert parents == {"search": None, **dict.fromkeys(TRIALS, mine.info.run_id)}
