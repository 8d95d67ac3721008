"""The four services that the tests run with, each kept to a folder, and what they have there then."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
import trackio
import wandb
from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trackio import sqlite_storage, utils
from trackio.sqlite_storage import SQLiteStorage

from tests.scenarios.other_processes import wait_until
from tests.tracking.wandb_records import WandbRun, read_run

FOUR = ["mlflow", "tensorboard", "wandb", "trackio"]
UNSET = (
    *("WANDB_PROJECT", "WANDB_LOG_MODEL", "WANDB_WATCH", "WANDB_DISABLED", "WANDB_NAME", "WANDB_RUN_ID"),
    *("MLFLOW_RUN_ID", "MLFLOW_TAGS", "MLFLOW_NESTED_RUN", "MLFLOW_FLATTEN_PARAMS"),
    *("TRACKIO_SPACE_ID", "TENSORBOARD_LOGGING_DIR"),
)
WANDB_FOLDERS = ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR")


@contextlib.contextmanager
def redirect_store(folder: Path) -> Iterator[MlflowClient]:
    """Let all four write below a folder only; gives a client on MLflow's store, whose experiment is `trials`."""
    with pytest.MonkeyPatch.context() as patch, mlflow_store(folder, patch) as client:
        for name in UNSET:
            patch.delenv(name, raising=False)
        for name in WANDB_FOLDERS:
            patch.setenv(name, str(folder))
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        # It reads its environment once in a process, and Trackio when it is imported.
        wandb.teardown()
        for module in (trackio, utils, sqlite_storage):
            patch.setattr(module, "TRACKIO_DIR", folder / "trackio")
        try:
            yield client
        finally:
            wandb.finish()
            wandb.teardown()


# ---- MLflow ----------------------------------------------------------------------------------------------------------


@functools.cache
def _empty_store() -> bytes:
    """A store with its tables, which take a second to make."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mlflow.db")
        MlflowClient(f"sqlite:///{path}").search_experiments()
        return path.read_bytes()


@contextlib.contextmanager
def mlflow_store(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[MlflowClient]:
    """A client on an empty store in a folder, to which MLflow writes, with the experiment `trials`."""
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    patch.setenv("MLFLOW_TRACKING_URI", uri)
    patch.setenv("MLFLOW_EXPERIMENT_NAME", "trials")
    for name in UNSET:
        patch.delenv(name, raising=False)
    (folder / "mlflow.db").write_bytes(_empty_store())
    client = MlflowClient(uri)
    client.create_experiment("trials", artifact_location=str(folder / "artifacts"))
    mlflow.set_tracking_uri(uri)
    try:
        yield client
    finally:
        while mlflow.active_run() is not None:
            mlflow.end_run()
        mlflow.set_tracking_uri("")


def runs_in(client: MlflowClient) -> list[Any]:
    """The runs of the experiment, oldest first."""
    experiment = client.get_experiment_by_name("trials")
    return client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])


def metrics_of(client: MlflowClient, run: Any) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of each metric; the store keeps one row of equal ones of the same millisecond."""
    rows = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {name: list(dict.fromkeys((row.step, row.value) for row in found)) for name, found in rows.items()}


# ---- TensorBoard, Weights & Biases, Trackio --------------------------------------------------------------------------


def read_events(folder: Path) -> dict[str, Any]:
    """Scalars as (step, value) pairs and texts, by tag, over all event files in a folder."""
    scalars: dict[str, list[tuple[int, float]]] = {}
    texts: dict[str, str] = {}
    # A file's name ends in a number that counts the files of the process: the tenth comes after the ninth.
    for path in sorted(folder.glob("events.*"), key=lambda path: int(path.suffix.removeprefix("."))):
        events = EventAccumulator(str(path)).Reload()
        for tag in events.Tags()["scalars"]:
            scalars.setdefault(tag, []).extend((event.step, event.value) for event in events.Scalars(tag))
        for tag in events.Tags()["tensors"]:
            texts[tag] = events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
    return {"scalars": scalars, "texts": texts}


def finished_run() -> WandbRun:
    """Finish the run and read what it left on the disk, which wandb's service may still be writing."""
    folder = Path(wandb.run.settings.sync_dir)
    wandb.finish()
    wait_until(lambda: read_run(folder).exit_code is not None, "wandb's service has written the end of the run")
    return read_run(folder)


def ended_runs(folder: Path, *names: str) -> dict[str, WandbRun]:
    """wandb's runs of these names, and no other, when all of them have ended: its service writes a little later."""

    def ended() -> dict[str, WandbRun]:
        runs = [read_run(path) for path in folder.glob("wandb/offline-run-*")]
        return {run.name: run for run in runs if run.exit_code is not None}

    wait_until(lambda: set(ended()) >= set(names), f"wandb's runs {names} have ended")
    runs = ended()
    assert sorted(runs) == sorted(names)
    return runs


def rows_of(project: str, run: str) -> list[dict[str, Any]]:
    """What was logged to a run of Trackio, without what it adds itself."""
    rows = SQLiteStorage.get_logs(project, run)
    return [{name: value for name, value in row.items() if name not in ("timestamp", "step")} for row in rows]
