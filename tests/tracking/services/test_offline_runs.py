"""Each service by its own client, which keeps its run in a folder; `make test-trackers` installs them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.compat.processes import environment
from tests.scenarios.trainers import quiet_trainer
from tests.tracking.both_sides import SIDES, TIMED, same_on_both_machines

# What only one side stores among the arguments.
PACKAGES = {"flyte": "flytekit"}
OWN = (
    *("lightning", "async_save", "eval_loss_weighting", "jit_checkpoint_signals", "logging_dir", "output_dir"),
    *("loss_normalization", "warmup_ratio", "_n_gpu"),
)


def run_of(side: str, service: str, folder: Path) -> dict[str, Any]:
    """What the service has after a short training on one side."""
    if importlib.util.find_spec(PACKAGES.get(service, service)) is None:
        pytest.skip(f"{service} is not installed: `make test-trackers` does it")
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.tracking.services.run_of", side, service, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment(), check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Reporting to" not in done.stderr, done.stderr[-3000:]
    return json.loads((folder / "result.json").read_text())


def both_runs_of(service: str, folder: Path) -> list[dict[str, Any]]:
    return [run_of(side, service, folder / side) for side in SIDES]


def values_of(rows: list[Any]) -> list[Any]:
    """Each logged value with its step, whichever call it came with."""
    found = [
        (step, name, value)
        for step, values in rows
        for name, value in same_on_both_machines(values).items()
        if name != "train/global_step"
    ]
    return sorted(found, key=str)


def test_swanlab_gets_what_it_gets_from_transformers(tmp_path: Path) -> None:
    theirs, ours = both_runs_of("swanlab", tmp_path)
    assert values_of(theirs["rows"]) == values_of(ours["rows"])
    names = Counter(name for _, name, _ in values_of(ours["rows"]))
    assert names["train/loss"] == 3 and names["eval/loss"] == 3 and names["test/loss"] == 1
    assert names["single_value/train_loss"] == 1
    assert len(ours["files"]) == 1
    expected = {name: value for name, value in theirs["config"].items() if name not in OWN}
    assert {name: ours["config"].get(name) for name in expected} == expected
    assert ours["config"]["learning_rate"] == 0.01 and ours["config"]["model_num_parameters"] > 0


def test_comet_gets_what_it_gets_from_transformers(tmp_path: Path) -> None:
    theirs, ours = both_runs_of("comet_ml", tmp_path)
    assert same_on_both_machines(theirs["metrics"]) == same_on_both_machines(ours["metrics"])
    assert {"eval/accuracy", "test/loss", "train/total_flos"} <= ours["metrics"].keys()
    assert [step for step, _, _ in ours["metrics"]["train/loss"]] == [2, 4, 6]
    own = ("args|output_dir", "run_arg_0", "run_arg_2")
    expected = {name: value for name, value in theirs["parameters"].items() if name not in own}
    assert {name: ours["parameters"].get(name) for name in expected} == expected
    assert ours["others"]["Name"] == "one short run"
    assert any("trainer_state.json" in upload for upload in ours["uploads"])


def test_clearml_gets_what_it_gets_from_transformers(tmp_path: Path) -> None:
    theirs, ours = both_runs_of("clearml", tmp_path)
    for run in (theirs, ours):
        run["scalars"] = sorted(event for event in run["scalars"] if not event[1].endswith(TIMED))
    assert theirs["scalars"] == ours["scalars"]
    assert ["train", "loss", 2] in [event[:3] for event in ours["scalars"]]
    assert theirs["singles"].keys() == ours["singles"].keys()
    assert theirs["singles"]["train_loss"] == ours["singles"]["train_loss"]
    assert ours["configuration"] == theirs["configuration"] == ["Model Configuration"]
    rate = "Transformers/learning_rate"
    assert ours["parameters"][rate] == theirs["parameters"][rate] == "0.01"
    missing = theirs["parameters"].keys() - ours["parameters"].keys()
    assert [name for name in missing if name.split("/")[1] not in OWN] == []
    assert not ours["open"] and not theirs["open"]


def test_dvclive_gets_what_it_gets_from_transformers(tmp_path: Path) -> None:
    theirs, ours = both_runs_of("dvclive", tmp_path)
    assert theirs["tables"].keys() == ours["tables"].keys() >= {"loss.tsv", "train/loss.tsv", "eval/accuracy.tsv"}
    for name, rows in ours["tables"].items():
        if not name.removesuffix(".tsv").endswith(TIMED):
            assert theirs["tables"][name] == rows, name
    assert len(ours["tables"]["loss.tsv"]) == 1 + 3
    assert "learning_rate: 0.01" in ours["parameters"]
    assert {"model.safetensors", "config.json", "training_args.bin"} <= set(ours["model"])


def test_codecarbon_writes_the_emissions_of_a_training(tmp_path: Path) -> None:
    run = run_of("littrainer", "codecarbon", tmp_path)
    assert (run["rows"], run["failed"]) == (1, False)
    assert {"emissions", "energy_consumed", "duration"} <= set(run["columns"])


def test_dagshub_gets_what_it_gets_from_transformers(tmp_path: Path) -> None:
    theirs, ours = both_runs_of("dagshub", tmp_path)
    assert theirs["uploads"] == ours["uploads"] == [["someone", "project", "main", "artifacts", "out"]]
    assert same_on_both_machines(theirs["metrics"]) == same_on_both_machines(ours["metrics"])
    assert ours["parameters"]["learning_rate"] == theirs["parameters"]["learning_rate"] == "0.01"


def test_flyte_gets_what_it_gets_from_transformers(tmp_path: Path) -> None:
    theirs, ours = both_runs_of("flyte", tmp_path)
    assert theirs["decks"] == ours["decks"] and "Log History" in ours["decks"]
    assert theirs["logged"] and ours["logged"]
    assert {"model.safetensors", "trainer_state.json"} <= set(ours["saved"]) >= set(theirs["saved"])


def test_azure_gets_metrics_outside_of_a_job_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("azureml.core.run", reason="azureml-core is not installed: `make test-trackers` does it")
    trainer = quiet_trainer(tmp_path, report_to="azure_ml", logging_strategy="steps", logging_steps=1, max_steps=1)
    trainer.train()
    # What a run that belongs to no job does with a metric.
    assert f"Attempted to log scalar metric loss:\n{trainer.state.log_history[0]['loss']}" in capsys.readouterr().out
