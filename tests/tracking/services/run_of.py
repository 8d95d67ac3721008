"""A short training that reports to a service offline, in a separate process, since clients patch their process.

The JSON result has the `values` of each metric, the `parameters` and the `files` of the run.

    python -m tests.tracking.services.run_of SIDE SERVICE FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import yaml

from tests.tracking.both_sides import make_trainer


def run_of_swanlab(side: str, folder: Path) -> dict[str, Any]:
    os.environ.update(SWANLAB_MODE="offline", SWANLAB_LOG_DIR=str(folder / "swanlog"))
    import swanlab

    if side == "transformers":
        # This release raises an error in transformers' callback without an active run.
        swanlab.init(experiment_name="one short run")
    values: dict[str, Any] = {}
    log = swanlab.log

    def recording(row: dict[str, Any], step: int | None = None) -> None:
        for name, value in row.items():
            values.setdefault(name, []).append([step, value])
        log(row, step=step)

    swanlab.log = recording
    trainer = make_trainer(side, folder / "out", report_to="swanlab")
    trainer.train()
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    config = json.loads(json.dumps(dict(swanlab.config), default=str))
    swanlab.finish()
    return {"values": values, "parameters": config, "files": [path.suffix for path in folder.rglob("*.swanlab")]}


def run_of_clearml(side: str, folder: Path) -> dict[str, Any]:
    os.environ["CLEARML_CACHE_DIR"] = str(folder / "cache")
    os.environ["CLEARML_LOG_MODEL"] = "false"
    import clearml

    clearml.Task.set_offline(offline_mode=True)
    trainer = make_trainer(side, folder / "out", report_to="clearml")
    trainer.train()
    session = next(Path(folder).rglob("metrics.jsonl")).parent
    task = json.loads((session / "task.json").read_text())
    values: dict[str, Any] = {}
    for line in (session / "metrics.jsonl").read_text().splitlines():
        for event in json.loads(line):
            if not event["metric"].startswith(":"):
                name = f"{event['metric']}/{event['variant']}"
                values.setdefault(name, []).append([event["iter"], event["value"]])
    parameters = {name: entry["value"] for name, entry in task["hyperparams"]["Transformers"].items()}
    is_open = clearml.Task.current_task() is not None
    return {"values": values, "parameters": parameters, "files": [*task["configuration"], is_open]}


def run_of_dvclive(side: str, folder: Path) -> dict[str, Any]:
    os.chdir(folder)
    os.environ["HF_DVCLIVE_LOG_MODEL"] = "true"
    make_trainer(side, folder / "out", report_to="dvclive").train()
    tables = Path("dvclive/plots/metrics")
    values = {str(path.relative_to(tables).with_suffix("")): path.read_text() for path in tables.rglob("*.tsv")}
    parameters = yaml.safe_load(Path("dvclive/params.yaml").read_text())
    model = sorted(path.name for path in Path("out/last").iterdir() if path.suffix in (".safetensors", ".bin"))
    return {"values": values, "parameters": parameters, "files": model}


def run_of_comet_ml(side: str, folder: Path) -> dict[str, Any]:
    # Features that use the network or the machine's environment.
    switched_off = ("AUTO_LOG_CO2", "AUTO_LOG_ENV_DETAILS", "AUTO_LOG_GIT_METADATA", "START_ONLINE")
    os.environ.update({f"COMET_{name}": "False" for name in switched_off})
    os.environ.update(COMET_OFFLINE_DIRECTORY=str(folder), COMET_LOG_ASSETS="true")
    import comet_ml

    trainer = make_trainer(side, folder / "out", report_to="comet_ml", save_strategy="steps", save_steps=3)
    trainer.train()
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    comet_ml.end()
    (archive,) = folder.glob("*.zip")
    result: dict[str, Any] = {"values": {}, "parameters": {}, "files": []}
    with zipfile.ZipFile(archive) as files:
        messages = map(json.loads, files.read("messages.json").splitlines())
        for kind, payload in ((message["type"], message["payload"]) for message in messages):
            if kind == "metric_msg" and payload["metric"]["metricName"].startswith(("train/", "eval/", "test/")):
                metric = payload["metric"]
                row = metric["step"], metric["epoch"], metric["metricValue"]
                result["values"].setdefault(metric["metricName"], []).append(row)
            elif kind == "parameter_msg":
                parameter = payload.get("param") or payload["params"]
                result["parameters"][parameter["paramName"].removeprefix("args|")] = parameter["paramValue"]
            elif kind == "log_other" and payload["key"] == "Name":
                result["files"].append(payload["value"])
    return result


def run_of_codecarbon(side: str, folder: Path) -> dict[str, Any]:
    from codecarbon import OfflineEmissionsTracker

    trainer = make_trainer(side, folder / "out", report_to="codecarbon")
    callbacks = {type(callback).__name__: callback for callback in trainer.callback_handler.callbacks}
    callback = callbacks["CodeCarbonCallback"]
    callback.tracker = OfflineEmissionsTracker(country_iso_code="CHE", output_dir=str(folder), log_level="error")
    trainer.train()
    heading, *rows = (folder / "emissions.csv").read_text().splitlines()
    return {"values": {"loss": len(rows)}, "parameters": {"learning_rate": 0.01}, "files": heading.split(",")}


def run_of_dagshub(side: str, folder: Path) -> dict[str, Any]:
    store = f"sqlite:///{folder / 'mlflow.db'}"
    os.environ.update(DAGSHUB_USER_TOKEN="none", HF_DAGSHUB_LOG_ARTIFACTS="true")
    import mlflow
    from dagshub.upload import Repo

    # MLflow writes to the local store; the variable names the repository.
    mlflow.set_tracking_uri(store)
    os.environ["MLFLOW_TRACKING_URI"] = "https://dagshub.com/someone/project.mlflow"
    uploads: list[str] = []

    class Directory:
        def __init__(self, repo: Any, path: str) -> None:
            self.target = [repo.owner, repo.name, repo.branch, path]

        def add_dir(self, local_path: str) -> None:
            uploads.extend([*self.target, Path(local_path).name])

    Repo.directory = lambda repo, path: Directory(repo, path)
    make_trainer(side, folder / "out", report_to="dagshub").train()
    while mlflow.active_run() is not None:
        mlflow.end_run()
    (run,) = mlflow.MlflowClient(store).search_runs(["0"])
    return {"values": run.data.metrics, "parameters": run.data.params, "files": uploads}


def run_of_flyte(side: str, folder: Path) -> dict[str, Any]:
    from tests.tracking.services.flyte_task import train

    return json.loads(train(side=side, folder=str(folder / "out")))


if __name__ == "__main__":
    side, service, path = sys.argv[1:]
    folder = Path(path).resolve()
    folder.joinpath("result.json").write_text(json.dumps(globals()[f"run_of_{service}"](side, folder)))
