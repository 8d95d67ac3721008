"""Checkpoints of littrainer and transformers resume in the other library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import littrainer
from tests.checkpoint.exchange_runs import KINDS, STEPS, Result, checkpoint, train
from tests.fidelity.conftest import environment_of_runs
from tests.scenarios.once_per_session import run_once
from tests.scenarios.releases import ABSENT, ROOT, earlier_release


def assert_same_numbers(resumed: Result, uninterrupted: Result) -> None:
    """Assert equal logs and weights, bit for bit."""
    assert [log["step"] for log in uninterrupted["logs"]] == [*range(1, STEPS + 1)]
    assert resumed["logs"] == uninterrupted["logs"]
    assert resumed["weights"].keys() == uninterrupted["weights"].keys()
    different = [
        name for name, value in uninterrupted["weights"].items() if not torch.equal(value, resumed["weights"][name])
    ]
    assert not different


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("writer", "reader"), [(littrainer, transformers), (transformers, littrainer)], ids=["to", "from"]
)
def test_a_training_resumes_exactly_in_the_other_library(tmp_path: Path, writer: Any, reader: Any, kind: str) -> None:
    uninterrupted = train(writer, KINDS[kind], tmp_path / kind)
    assert_same_numbers(train(reader, KINDS[kind], tmp_path / "second", checkpoint(tmp_path, kind)), uninterrupted)


@pytest.fixture(scope="session")
def earlier_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that transformers 5.3.0 wrote (`theirs`), and that it resumed (`ours`), from one process."""
    release = earlier_release()
    if release is None:
        pytest.skip(ABSENT)

    def run(folder: Path) -> None:
        for name, kind in KINDS.items():
            torch.save(train(littrainer, kind, folder / "ours" / name), folder / "ours" / f"{name}.whole.pt")
        environment = environment_of_runs()
        environment["PYTHONPATH"] = os.pathsep.join([str(release), environment["PYTHONPATH"]])
        (folder / "theirs").mkdir()
        command = [sys.executable, "-m", "tests.checkpoint.exchange_runs", folder / "theirs", folder / "ours"]
        subprocess.run([str(part) for part in command], cwd=ROOT, env=environment, check=True, timeout=600)

    folder = run_once(tmp_path_factory, "transformers-5.3.0", run)
    assert (folder / "theirs" / "version").read_text() == "5.3.0"
    return folder


def result(folder: Path, name: str) -> Result:
    return torch.load(folder / f"{name}.pt", weights_only=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_of_transformers_5_3_resumes_exactly_here(earlier_runs: Path, tmp_path: Path, kind: str) -> None:
    resumed = train(littrainer, KINDS[kind], tmp_path, checkpoint(earlier_runs / "theirs", kind))
    assert_same_numbers(resumed, result(earlier_runs / "theirs", f"{kind}.whole"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_resumes_exactly_in_transformers_5_3(earlier_runs: Path, kind: str) -> None:
    resumed = result(earlier_runs / "theirs", f"{kind}.resumed")
    assert_same_numbers(resumed, result(earlier_runs / "ours", f"{kind}.whole"))
