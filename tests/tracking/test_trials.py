"""Each trial of a search has a run of its own in every tracker, which says how it ended."""

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
from tests.tracking.both_sides import SIDES, trainer_of
from tests.tracking.stores import FOUR, ended_runs, read_events, redirect_store, rows_of, runs_in

TRIALS = ["run-0", "run-1", "run-2"]


def searched(side: str, folder: Path, hp_name: Any = None, **changes: Any) -> Any:
    """A Trainer after a search over three trials, of which the second is pruned at its first evaluation."""
    trainer = trainer_of(side, folder, model_init=lambda: tiny_bert_classifier(), **changes)
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
def named(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each side writes of trials that the script has named."""
    found = {}
    for side in SIDES:
        folder = tmp_path_factory.mktemp(side)
        with redirect_store(folder):
            searched(side, folder / "out", lambda trial: f"try-{trial.number}", report_to=["tensorboard", "wandb"])
            wandb.finish()
            found[side] = {
                "events": {path.name: read_events(path)["scalars"] for path in folder.glob("out/runs/*/*")},
                "wandb": ended_runs(folder, "try-0", "try-1", "try-2"),
            }
    return found


def test_trials_with_names_have_the_runs_that_they_have_under_transformers(named: dict[str, dict[str, Any]]) -> None:
    theirs, ours = (named[side] for side in SIDES)
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


def test_without_names_trials_are_called_by_their_folders_and_what_follows_the_search_has_a_run_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Weights & Biases takes the name of the run away from all.
    services = [name for name in FOUR if name != "wandb"]
    with redirect_store(tmp_path) as client:
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
        trainer = searched("littrainer", tmp_path / "out", report_to=services, project="named", run_name="mine")
        assert mlflow.active_run() is None
        runs = runs_in(client)
        assert [run.info.run_name for run in runs] == [f"mine-{name}" for name in TRIALS]
        assert {run.info.status for run in runs} == {"FINISHED"}
        assert len({run.data.params["learning_rate"] for run in runs}) == 3
        assert sorted(SQLiteStorage.get_runs("named")) == [f"mine-{name}" for name in TRIALS]
        assert [row["train/global_step"] for row in rows_of("named", "mine-run-1")] == [2, 3]
        assert sorted(path.name for path in (tmp_path / "events").iterdir() if path.is_dir()) == TRIALS
        trainer.train()
        assert runs_in(client)[-1].info.run_name == "mine" in SQLiteStorage.get_runs("named")
        for folder in (tmp_path / "events", tmp_path / "events" / "run-2"):
            assert [step for step, _ in read_events(folder)["scalars"]["eval/loss"]] == [3, 6]


def test_a_trial_that_fails_ends_its_run_as_failed(tmp_path: Path) -> None:
    class Breaks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.trial_params is not None and state.trial_params["learning_rate"] == 0.02:
                raise ZeroDivisionError("broken")

    with redirect_store(tmp_path) as client:
        services = {"report_to": ["wandb", "mlflow"], "run_name": "after"}
        trainer = trainer_of("littrainer", tmp_path / "out", model_init=lambda: tiny_bert_classifier(), **services)
        trainer.add_callback(Breaks())
        rates = iter([0.02, 0.03])
        trainer.hyperparameter_search(
            lambda trial: {"learning_rate": trial.suggest_float("learning_rate", rate := next(rates), rate)},
            n_trials=2,
            backend="optuna",
            catch=(ZeroDivisionError,),
        )
        trainer.train()
        wandb.finish()
        runs = ended_runs(tmp_path, "run-0", "run-1", "after")
        assert {name: run.exit_code for name, run in runs.items()} == {"run-0": 1, "run-1": 0, "after": 0}
        assert runs["after"].config["learning_rate"] == 0.01
        assert [run.info.status for run in runs_in(client)] == ["FAILED", "FINISHED", "FINISHED"]


def test_trials_inside_a_run_of_mlflow_are_nested_where_the_environment_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redirect_store(tmp_path) as client:
        monkeypatch.setenv("MLFLOW_NESTED_RUN", "true")
        mlflow.set_experiment("trials")
        mine = mlflow.start_run(run_name="search")
        searched("littrainer", tmp_path / "out", report_to="mlflow", run_name=None)
        active = mlflow.active_run()
        assert active is not None and active.info.run_id == mine.info.run_id
        parents = {run.info.run_name: run.data.tags.get("mlflow.parentRunId") for run in runs_in(client)}
    assert parents == {"search": None, **dict.fromkeys(TRIALS, mine.info.run_id)}
