"""The example of a search runs as its head says; the classifier that it searches for is run by `make demo`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from littrainer.cli import main
from littrainer.search.record import best_of, read_record
from tests.compat.processes import run_python

pytest.importorskip("optuna")
pytest.importorskip("matplotlib")

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_example_of_a_search_compares_its_learning_rate_with_the_default_and_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--trials", "3", "--labels", "2", "--texts", "160", "--epochs", "1", "--output_dir", "out"]
    done = run_python("-m", "littrainer", "run", str(EXAMPLES / "hyperparameter_search.py"), *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (found,) = re.findall(r"^(\S+) \(trial (\d)\) +([01]\.\d{3})$", done.stdout, re.MULTILINE)
    assert re.search(r"^5\.00e-05 \(default\) +[01]\.\d{3}$", done.stdout, re.MULTILINE)
    assert len(re.findall(r"^\[littrainer\] trial \d \(\d of 3\)", done.stderr, re.MULTILINE)) == 3

    stored = read_record(tmp_path / "out")
    (best,) = best_of(stored.trials, stored.directions)
    assert len(stored.trials) == 3 and stored.backend == "optuna"
    assert found[:2] == (f"{best.parameters['learning_rate']:.2e}", best.id)

    assert main(["report", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.count("\n") == 2
    assert f"Best trial: {best.id}" in (tmp_path / "out" / "report.html").read_text()
