"""TensorBoard, MLflow, Weights & Biases and Trackio get from a training what transformers' Trainer writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trackio
from trackio.sqlite_storage import SQLiteStorage

from tests.tracking.both_sides import SIDES, assert_token_is_masked, same_on_both_machines, trainer_of
from tests.tracking.stores import FOUR, finished_run, metrics_of, read_events, redirect_store, rows_of, runs_in

RUN = "one short run"
# Folders that differ between the sides, and what services add.
NOT_COMPARED = ("output_dir", "logging_dir", "project")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each side left behind of a training (MLflow), an evaluation (TensorBoard) and a prediction, and where."""
    found = {}
    for side in SIDES:
        folder = tmp_path_factory.mktemp(side)
        with redirect_store(folder) as client, pytest.MonkeyPatch.context() as patch:
            patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "events"))
            trainer = trainer_of(side, folder / "out", report_to=FOUR, project=side)
            trainer.train()
            (run,) = runs_in(client)
            metrics = metrics_of(client, run)
            trainer.evaluate()
            trainer.predict(trainer.eval_dataset)
            trackio.finish()
            found[side] = {
                "folder": folder,
                "mlflow": (run, metrics),
                "tensorboard": read_events(folder / "events"),
                "trackio": (rows_of(side, RUN), SQLiteStorage.get_run_config(side, RUN)),
                "wandb": finished_run(),
            }
    return found


def assert_shows_what_transformers_shows(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    expected = {name: one for name, one in theirs.items() if name not in NOT_COMPARED and not name.startswith("_")}
    assert {name: ours.get(name) for name in expected} == expected and expected


def test_tensorboard(both: dict[str, dict[str, Any]]) -> None:
    theirs, ours = (both[side]["tensorboard"] for side in SIDES)
    assert list(theirs["scalars"]) == list(ours["scalars"])
    assert same_on_both_machines(theirs["scalars"]) == same_on_both_machines(ours["scalars"])
    assert {"train/grad_norm", "eval/accuracy", "train/total_flos", "train/train_loss"} <= ours["scalars"].keys()
    assert [step for step, _ in ours["scalars"]["eval/loss"]] == [3, 6, 6]
    assert theirs["texts"]["model_config/text_summary"] == ours["texts"]["model_config/text_summary"]
    assert_shows_what_transformers_shows(*(json.loads(one["texts"]["args/text_summary"]) for one in (ours, theirs)))


def test_mlflow(both: dict[str, dict[str, Any]]) -> None:
    (their_run, theirs), (our_run, ours) = (both[side]["mlflow"] for side in SIDES)
    assert same_on_both_machines(theirs) == same_on_both_machines(ours)
    assert [step for step, _ in ours["loss"]] == [2, 4, 6]
    assert {"eval_accuracy", "train_loss", "total_flos", "grad_norm"} <= ours.keys()
    assert_shows_what_transformers_shows(our_run.data.params, their_run.data.params)
    assert (our_run.info.run_name, our_run.info.status) == (their_run.info.run_name, their_run.info.status)
    assert (our_run.info.run_name, our_run.info.status) == (RUN, "FINISHED")


def test_weights_and_biases(both: dict[str, dict[str, Any]]) -> None:
    theirs, ours = (both[side]["wandb"] for side in SIDES)
    assert list(map(same_on_both_machines, theirs.history)) == list(map(same_on_both_machines, ours.history))
    assert {"train/loss", "train/global_step"} <= ours.history[0].keys()
    assert ours.history[-1]["test/accuracy"] == ours.history[-2]["eval/accuracy"]
    assert_shows_what_transformers_shows(ours.config, theirs.config)
    assert ours.config["model/num_parameters"] > 0 and "train_loss" in ours.summary
    assert same_on_both_machines(theirs.summary) == same_on_both_machines(ours.summary)
    assert (theirs.name, theirs.project) == (ours.name, ours.project) == (RUN, "huggingface")


def test_trackio(both: dict[str, dict[str, Any]]) -> None:
    (their_rows, theirs), (our_rows, ours) = (both[side]["trackio"] for side in SIDES)
    assert list(map(same_on_both_machines, their_rows)) == list(map(same_on_both_machines, our_rows))
    assert {"train/loss", "train/global_step"} <= our_rows[0].keys()
    assert our_rows[-1]["test/accuracy"] == our_rows[-2]["eval/accuracy"]
    assert_shows_what_transformers_shows(ours, theirs)
    assert ours["model/num_parameters"] > 0


def test_no_record_has_the_token(both: dict[str, dict[str, Any]]) -> None:
    folder: Path = both["littrainer"]["folder"]
    for place in ("events", "mlflow.db", "trackio", "wandb"):
        assert_token_is_masked(folder / place)
