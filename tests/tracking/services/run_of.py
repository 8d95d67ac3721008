"""A short training in a process of its own, which reports to a service offline; says as JSON what the service has then.

Clients patch their process in many places, so each has one.

    python -m tests.tracking.services.run_of SIDE SERVICE FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

from tests.tracking.both_sides import trainer_of


def run_of_swanlab(side: str, folder: Path) -> dict[str, Any]:
    os.environ.update(SWANLAB_MODE="offline", SWANLAB_LOG_DIR=str(folder / "swanlog"))
    import swanlab

    if side == "transformers":
        # Its callback asks for the active run in a way that this release answers with an error.
        swanlab.init(experiment_name="one short run")
    rows: list[Any] = []
    log = swanlab.log

    def recording(values: dict[str, Any], step: int | None = None) -> None:
        rows.append([step, values])
        log(values, step=step)

    swanlab.log = recording
    trainer = trainer_of(side, folder / "out", report_to="swanlab")
    trainer.train()
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    config = dict(swanlab.config)
    swanlab.finish()
    found = [str(path.relative_to(folder)) for path in folder.rglob("*.swanlab")]
    return {"rows": rows, "config": json.loads(json.dumps(config, default=str)), "files": found}


def run_of_clearml(side: str, folder: Path) -> dict[str, Any]:
    os.environ["CLEARML_CACHE_DIR"] = str(folder / "cache")
    os.environ["CLEARML_LOG_MODEL"] = "false"
    import clearml

    clearml.Task.set_offline(offline_mode=True)
    trainer = trainer_of(side, folder / "out", report_to="clearml")
    trainer.train()
    session = next(Path(folder).rglob("metrics.jsonl")).parent
    task = json.loads((session / "task.json").read_text())
    scalars, singles = [], {}
    for line in (session / "metrics.jsonl").read_text().splitlines():
        for event in json.loads(line):
            if event["metric"] == "Summary":
                singles[event["variant"]] = event["value"]
            elif not event["metric"].startswith(":"):
                scalars.append([event["metric"], event["variant"], event["iter"], event["value"]])
    parameters = {
        f"{section}/{name}": entry["value"]
        for section, entries in task["hyperparams"].items()
        if section != "Args"
        for name, entry in entries.items()
    }
    return {
        "scalars": scalars,
        "singles": singles,
        "parameters": parameters,
        "configuration": sorted(task["configuration"]),
        "open": clearml.Task.current_task() is not None,
    }


def run_of_dvclive(side: str, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    os.environ["HF_DVCLIVE_LOG_MODEL"] = "true"
    trainer = trainer_of(side, folder / "out", report_to="dvclive")
    trainer.train()
    tables = {
        str(path.relative_to("dvclive/plots/metrics")): path.read_text().splitlines()
        for path in Path("dvclive/plots/metrics").rglob("*.tsv")
    }
    model = sorted(path.name for path in Path("out/last").iterdir())
    return {"tables": tables, "parameters": Path("dvclive/params.yaml").read_text(), "model": model}


def run_of_comet_ml(side: str, folder: Path) -> dict[str, Any]:
    # What it would look for on the network or in the environment of the machine.
    switched_off = ("AUTO_LOG_CO2", "AUTO_LOG_ENV_DETAILS", "AUTO_LOG_GIT_METADATA", "START_ONLINE")
    os.environ.update({f"COMET_{name}": "False" for name in switched_off})
    os.environ.update(COMET_OFFLINE_DIRECTORY=str(folder), COMET_LOG_ASSETS="true")
    import comet_ml

    trainer = trainer_of(side, folder / "out", report_to="comet_ml", save_strategy="steps", save_steps=3)
    trainer.train()
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    comet_ml.end()
    (archive,) = folder.glob("*.zip")
    found: dict[str, Any] = {"metrics": {}, "parameters": {}, "others": {}, "uploads": []}
    with zipfile.ZipFile(archive) as files:
        messages = map(json.loads, files.read("messages.json").splitlines())
        for kind, payload in ((message["type"], message["payload"]) for message in messages):
            if kind == "metric_msg" and payload["metric"]["metricName"].startswith(("train/", "eval/", "test/")):
                metric = payload["metric"]
                row = metric["step"], metric["epoch"], metric["metricValue"]
                found["metrics"].setdefault(metric["metricName"], []).append(row)
            elif kind == "parameter_msg":
                parameter = payload.get("param") or payload["params"]
                found["parameters"][parameter["paramName"]] = parameter["paramValue"]
            elif kind == "log_other":
                found["others"][payload["key"]] = payload["value"]
            elif kind == "file_upload":
                found["uploads"].append(json.dumps(payload))
    return found


def run_of_codecarbon(side: str, folder: Path) -> dict[str, Any]:
    from codecarbon import OfflineEmissionsTracker

    from littrainer.tracking import CodeCarbonCallback

    folder.mkdir(parents=True, exist_ok=True)
    callback = CodeCarbonCallback()
    callback.tracker = OfflineEmissionsTracker(country_iso_code="CHE", output_dir=str(folder), log_level="error")
    trainer = trainer_of(side, folder / "out", callbacks=[callback])
    trainer.train()
    heading, *rows = (folder / "emissions.csv").read_text().splitlines()
    return {"columns": heading.split(","), "rows": len(rows), "failed": callback.has_failed}


def run_of_dagshub(side: str, folder: Path) -> dict[str, Any]:
    store = f"sqlite:///{folder / 'mlflow.db'}"
    os.environ.update(DAGSHUB_USER_TOKEN="none", HF_DAGSHUB_LOG_ARTIFACTS="true")
    import mlflow
    from dagshub.upload import Repo

    # MLflow writes here, and the name of the repository comes from the variable.
    mlflow.set_tracking_uri(store)
    os.environ["MLFLOW_TRACKING_URI"] = "https://dagshub.com/someone/project.mlflow"
    uploads: list[list[str]] = []

    class Directory:
        def __init__(self, repo: Any, path: str) -> None:
            self.place = [repo.owner, repo.name, repo.branch, path]

        def add_dir(self, local_path: str) -> None:
            uploads.append([*self.place, Path(local_path).name])

    Repo.directory = lambda repo, path: Directory(repo, path)
    trainer = trainer_of(side, folder / "out", report_to="dagshub")
    trainer.train()
    while mlflow.active_run() is not None:
        mlflow.end_run()
    (run,) = mlflow.MlflowClient(store).search_runs(["0"])
    return {"uploads": uploads, "metrics": run.data.metrics, "parameters": run.data.params}


def run_of_flyte(side: str, folder: Path) -> dict[str, Any]:
    from tests.tracking.services.flyte_task import train

    return json.loads(train(side=side, folder=str(folder / "out")))


if __name__ == "__main__":
    side, service, place = sys.argv[1:]
    result = globals()[f"run_of_{service}"](side, Path(place).resolve())
    Path(place).resolve().joinpath("result.json").write_text(json.dumps(result))
