"""Offline runs of each service's client; `make test-trackers` installs the clients."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.compat.processes import environment
from tests.scenarios.trainers import quiet_trainer
from tests.tracking.both_sides import SIDES, drop_times

PACKAGES = {"flyte": "flytekit"}
# Arguments that are stored on a single side.
DIFFERENT_PARAMETERS = {
    *("lightning", "async_save", "eval_loss_weighting", "jit_checkpoint_signals", "logging_dir", "output_dir"),
    *("loss_normalization", "warmup_ratio", "_n_gpu", "run_arg_0", "run_arg_2"),
}


def run_service(side: str, service: str, folder: Path) -> dict[str, Any]:
    """Return the service's record of a short training on a side."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.tracking.services.run_of", side, service, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment(), check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Reporting to" not in done.stderr, done.stderr[-3000:]
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("service", ["swanlab", "comet_ml", "clearml", "dvclive", "codecarbon", "dagshub", "flyte"])
def test_a_service_gets_the_same_values_as_from_transformers(tmp_path: Path, service: str) -> None:
    if importlib.util.find_spec(PACKAGES.get(service, service)) is None:
        pytest.skip(f"{service} is not installed: `make test-trackers` does it")
    theirs, ours = (run_service(side, service, tmp_path / side) for side in SIDES)
    assert drop_times(theirs["values"]) == drop_times(ours["values"])
    assert any("loss" in name for name in ours["values"])
    expected = {name: value for name, value in theirs["parameters"].items() if name not in DIFFERENT_PARAMETERS}
    assert {name: ours["parameters"].get(name) for name in expected} == expected
    assert float(ours["parameters"]["learning_rate"]) == 0.01
    assert ours["files"] == theirs["files"] != []


def test_azure_gets_metrics_outside_of_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("azureml.core.run", reason="azureml-core is not installed: `make test-trackers` does it")
    trainer = quiet_trainer(tmp_path, report_to="azure_ml", logging_strategy="steps", logging_steps=1, max_steps=1)
    trainer.train()
    # Runs outside of a job print their metrics.
    assert f"Attempted to log scalar metric loss:\n{trainer.state.log_history[0]['loss']}" in capsys.readouterr().out
