"""Records of TensorBoard, MLflow, Weights & Biases and Trackio are the same as with transformers' Trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trackio
from trackio.sqlite_storage import SQLiteStorage

from tests.tracking.both_sides import SIDES, assert_token_is_masked, drop_times, make_trainer
from tests.tracking.stores import SERVICES, finish_run, list_runs, read_events, read_metrics, read_rows, redirect_store

RUN = "one short run"
# Parameters that differ between the sides.
IGNORED = ("output_dir", "logging_dir", "project")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the records of each side: training (MLflow), with evaluation (TensorBoard) and prediction (others)."""
    records = {}
    for side in SIDES:
        folder = tmp_path_factory.mktemp(side)
        with redirect_store(folder) as client, pytest.MonkeyPatch.context() as patch:
            patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "events"))
            trainer = make_trainer(side, folder / "out", report_to=SERVICES, project=side)
            trainer.train()
            (run,) = list_runs(client)
            metrics = read_metrics(client, run)
            trainer.evaluate()
            trainer.predict(trainer.eval_dataset)
            trackio.finish()
            records[side] = {
                "folder": folder,
                "mlflow": (run, metrics),
                "tensorboard": read_events(folder / "events"),
                "trackio": (read_rows(side, RUN), SQLiteStorage.get_run_config(side, RUN)),
                "wandb": finish_run(),
            }
    return records


def assert_same_parameters(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    expected = {name: value for name, value in theirs.items() if name not in IGNORED and not name.startswith("_")}
    assert {name: ours.get(name) for name in expected} == expected and expected


def test_tensorboard(both: dict[str, dict[str, Any]]) -> None:
    theirs, ours = (both[side]["tensorboard"] for side in SIDES)
    assert list(theirs["scalars"]) == list(ours["scalars"])
    assert drop_times(theirs["scalars"]) == drop_times(ours["scalars"])
    assert {"train/grad_norm", "eval/accuracy", "train/total_flos", "train/train_loss"} <= ours["scalars"].keys()
    assert [step for step, _ in ours["scalars"]["eval/loss"]] == [3, 6, 6]
    assert theirs["texts"]["model_config/text_summary"] == ours["texts"]["model_config/text_summary"]
    assert_same_parameters(*(json.loads(record["texts"]["args/text_summary"]) for record in (ours, theirs)))


def test_mlflow(both: dict[str, dict[str, Any]]) -> None:
    (their_run, theirs), (our_run, ours) = (both[side]["mlflow"] for side in SIDES)
    assert drop_times(theirs) == drop_times(ours)
    assert [step for step, _ in ours["loss"]] == [2, 4, 6]
    assert {"eval_accuracy", "train_loss", "total_flos", "grad_norm"} <= ours.keys()
    assert_same_parameters(our_run.data.params, their_run.data.params)
    assert (our_run.info.run_name, our_run.info.status) == (their_run.info.run_name, their_run.info.status)
    assert (our_run.info.run_name, our_run.info.status) == (RUN, "FINISHED")


def test_weights_and_biases(both: dict[str, dict[str, Any]]) -> None:
    theirs, ours = (both[side]["wandb"] for side in SIDES)
    assert list(map(drop_times, theirs.history)) == list(map(drop_times, ours.history))
    assert {"train/loss", "train/global_step"} <= ours.history[0].keys()
    assert ours.history[-1]["test/accuracy"] == ours.history[-2]["eval/accuracy"]
    assert_same_parameters(ours.config, theirs.config)
    assert ours.config["model/num_parameters"] > 0 and "train_loss" in ours.summary
    assert drop_times(theirs.summary) == drop_times(ours.summary)
    assert (theirs.name, theirs.project) == (ours.name, ours.project) == (RUN, "huggingface")


def test_trackio(both: dict[str, dict[str, Any]]) -> None:
    (their_rows, theirs), (our_rows, ours) = (both[side]["trackio"] for side in SIDES)
    assert list(map(drop_times, their_rows)) == list(map(drop_times, our_rows))
    assert {"train/loss", "train/global_step"} <= our_rows[0].keys()
    assert our_rows[-1]["test/accuracy"] == our_rows[-2]["eval/accuracy"]
    assert_same_parameters(ours, theirs)
    assert ours["model/num_parameters"] > 0


def test_no_record_has_the_token(both: dict[str, dict[str, Any]]) -> None:
    folder: Path = both["littrainer"]["folder"]
    for name in ("events", "mlflow.db", "trackio", "wandb"):
        assert_token_is_masked(folder / name)
