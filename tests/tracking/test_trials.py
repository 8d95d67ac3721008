"""Each trial of a search has a run of its own, with what the same trial has under transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from littrainer.tracking.base import TrackerCallback
from tests.scenarios.models import tiny_bert_classifier
from tests.scenarios.other_processes import wait_until
from tests.tracking.both_sides import SIDES, same_on_both_machines, search_on, trainer_of
from tests.tracking.test_tensorboard import read_events

TRIALS = ("try-0", "try-1", "try-2")
# transformers counts to a trial what the pruned one before it computed after its last log.
COUNTED_ON = ("total_flos", "train/total_flos")


def name_of(trial: Any) -> str:
    return f"try-{trial.number}"


def comparable(values: dict[str, Any]) -> dict[str, Any]:
    """What a trial logs, without what depends on the machine or on the trial before."""
    return {name: value for name, value in same_on_both_machines(values).items() if name not in COUNTED_ON}


# ---- TensorBoard -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def event_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each side writes of each trial."""
    found = {}
    for side in SIDES:
        folder = tmp_path_factory.mktemp(side)
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
            search_on(side, folder, hp_name=name_of, report_to="tensorboard")
        found[side] = {path.name: read_events(path) for path in folder.glob("runs/*/*")}
    return found


def test_each_trial_has_event_files_in_a_folder_of_its_name_with_the_values_of_transformers(event_files: Any) -> None:
    theirs, ours = (event_files[side] for side in SIDES)
    assert sorted(ours) == sorted(theirs) == sorted(TRIALS)
    for trial in TRIALS:
        assert comparable(ours[trial]["scalars"]) == comparable(theirs[trial]["scalars"])
    assert [step for step, _ in ours["try-0"]["scalars"]["eval/loss"]] == [3, 6]
    # Pruned at its first evaluation.
    assert [step for step, _ in ours["try-1"]["scalars"]["eval/loss"]] == [3]


def test_without_names_trials_lie_side_by_side_and_what_follows_the_search_does_not_go_to_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = search_on("littrainer", tmp_path / "out", report_to="tensorboard")
    folders = [path for path in (tmp_path / "events").iterdir() if path.is_dir()]
    assert sorted(path.name for path in folders) == ["run-0", "run-1", "run-2"]
    trainer.train()
    assert [step for step, _ in read_events(tmp_path / "events")["scalars"]["eval/loss"]] == [3, 6]
    assert [step for step, _ in read_events(tmp_path / "events" / "run-2")["scalars"]["eval/loss"]] == [3, 6]


# ---- MLflow ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mlflow_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The runs that each side leaves, oldest first, each with its metrics."""
    import mlflow

    from tests.tracking.test_mlflow import metrics_of, new_store, runs_in

    found = {}
    for side in SIDES:
        folder = tmp_path_factory.mktemp(side)
        with pytest.MonkeyPatch.context() as patch, new_store(folder, patch) as client:
            search_on(side, folder / "out", report_to="mlflow", run_name=None)
            assert mlflow.active_run() is None
            found[side] = [(run, metrics_of(client, run)) for run in runs_in(client)]
    return found


def test_each_trial_is_a_run_of_mlflow_with_the_metrics_of_transformers_and_its_own_parameters(
    mlflow_runs: Any,
) -> None:
    theirs, ours = (mlflow_runs[side] for side in SIDES)
    assert [comparable(metrics) for _, metrics in ours] == [comparable(metrics) for _, metrics in theirs]
    assert [run.info.status for run, _ in ours] == ["FINISHED"] * 3
    assert [run.info.run_name for run, _ in ours] == ["run-0", "run-1", "run-2"]
    assert len({run.data.params["learning_rate"] for run, _ in ours}) == 3


def test_trials_inside_a_run_of_the_script_are_nested_where_the_environment_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    from tests.tracking.test_mlflow import new_store, runs_in

    with new_store(tmp_path, monkeypatch) as client:
        monkeypatch.setenv("MLFLOW_NESTED_RUN", "true")
        mlflow.set_experiment("trials")
        mine = mlflow.start_run(run_name="search")
        search_on("littrainer", tmp_path / "out", report_to="mlflow", run_name=None)
        active = mlflow.active_run()
        assert active is not None and active.info.run_id == mine.info.run_id
        parents = {run.info.run_name: run.data.tags.get("mlflow.parentRunId") for run in runs_in(client)}
    assert parents == {"search": None, **dict.fromkeys(("run-0", "run-1", "run-2"), mine.info.run_id)}


# ---- Weights & Biases ------------------------------------------------------------------------------------------------


@pytest.fixture
def wandb_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where wandb writes, offline; it reads its environment once in a process."""
    import wandb

    for name in ("WANDB_PROJECT", "WANDB_LOG_MODEL", "WANDB_WATCH", "WANDB_DISABLED", "WANDB_NAME", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()
    yield tmp_path / "wandb"
    wandb.teardown()


def ended_runs(folder: Path, *names: str) -> dict[str, Any]:
    """The runs of these names, and no other, when all of them have ended: wandb's service writes a little later."""
    from tests.tracking.wandb_records import read_run

    def ended() -> dict[str, Any]:
        runs = [read_run(path) for path in folder.glob("offline-run-*")]
        return {run.name: run for run in runs if run.exit_code is not None}

    wait_until(lambda: set(ended()) >= set(names), f"wandb's runs {names} have ended")
    runs = ended()
    assert sorted(runs) == sorted(names)
    return runs


def test_each_trial_is_a_run_of_wandb_as_under_transformers(wandb_folder: Path, tmp_path: Path) -> None:
    import wandb

    names = {side: [f"{side}-{number}" for number in range(3)] for side in SIDES}
    for side in SIDES:
        search_on(side, tmp_path / "out", hp_name=lambda trial, side=side: names[side][trial.number], report_to="wandb")
        wandb.finish()
    runs = ended_runs(wandb_folder, *names["transformers"], *names["littrainer"])
    found = {side: [runs[name] for name in names[side]] for side in SIDES}
    for theirs, ours in zip(*(found[side] for side in SIDES), strict=True):
        assert list(map(comparable, ours.history)) == list(map(comparable, theirs.history))
        assert ours.config["learning_rate"] == theirs.config["learning_rate"]
        assert (ours.group, ours.project, ours.exit_code) == (theirs.group, theirs.project, 0)
    assert len({run.config["learning_rate"] for run in found["littrainer"]}) == 3


def test_a_trial_that_fails_ends_its_run_of_wandb_as_failed_and_a_training_after_the_search_has_another(
    wandb_folder: Path, tmp_path: Path
) -> None:
    import wandb

    from littrainer import TrainerCallback

    class Breaks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.trial_params is not None and state.trial_params["learning_rate"] == 0.02:
                raise ZeroDivisionError("broken")

    trainer = trainer_of(
        "littrainer", tmp_path / "out", model_init=lambda: tiny_bert_classifier(), report_to="wandb", run_name="after"
    )
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
    runs = ended_runs(wandb_folder, "run-0", "run-1", "after")
    assert {name: run.exit_code for name, run in runs.items()} == {"run-0": 1, "run-1": 0, "after": 0}
    assert runs["run-1"].group == str(tmp_path / "out")
    assert runs["after"].config["learning_rate"] == 0.01


# ---- Trackio ---------------------------------------------------------------------------------------------------------


def test_each_trial_is_a_run_of_trackio_also_where_one_run_name_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trackio
    from trackio import sqlite_storage, utils
    from trackio.sqlite_storage import SQLiteStorage

    from tests.tracking.test_trackio import rows_of

    for module in (trackio, utils, sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path)
    monkeypatch.delenv("TRACKIO_SPACE_ID", raising=False)
    search_on("littrainer", tmp_path / "out", report_to="trackio", project="named", run_name="mine")
    assert sorted(SQLiteStorage.get_runs("named")) == ["mine-run-0", "mine-run-1", "mine-run-2"]
    steps = [row["train/global_step"] for row in rows_of("named", "mine-run-1")]
    assert steps == [2, 3]
    search_on("littrainer", tmp_path / "out2", report_to="trackio", project="unnamed", run_name=None)
    assert len(SQLiteStorage.get_runs("unnamed")) == 3


# ---- All of them -----------------------------------------------------------------------------------------------------


def test_a_tracker_is_told_where_the_trial_saves_and_forgets_it_afterwards(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Watching(TrackerCallback):
        service = "tensorboard"

        def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
            seen.append((self.trial_folder, self.run_name(args, state)))

        def end_trial(self) -> None:
            seen.append("ended")

    trainer = search_on("littrainer", tmp_path, callbacks=[Watching()], run_name="mine")
    trainer.train()
    runs = [(tmp_path / f"run-{number}", f"mine-run-{number}") for number in range(3)]
    # The one that was pruned is ended at once, and not again.
    assert seen == [runs[0], "ended", runs[1], "ended", runs[2], "ended", (None, "mine")]
