"""The examples that use Lightning by name run as their heads say, with less to do."""

from __future__ import annotations

import asyncio
import csv
import email
import importlib
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

EXAMPLES = Path(__file__).parents[2] / "examples"


Example = Callable[..., None]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Example:
    """Runs an example in this process, with options, in a folder of its own, and with two packages for its texts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    texts: Any = importlib.import_module("local_texts")
    two_packages = [
        (path, f"{package.__name__}.{path.stem}")
        for package in (asyncio, email)
        for path in sorted(Path(package.__path__[0]).glob("*.py"))
    ]
    # Reading all of them takes longer than these trainings.
    monkeypatch.setattr(texts, "source_files", lambda: iter(two_packages))
    texts.read_documentation.cache_clear()

    def run(name: str, *options: str) -> None:
        monkeypatch.setattr(sys, "argv", [name, *options])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    return run


def scores_in(printed: str) -> dict[str, tuple[float, float]]:
    """Accuracy and macro-F1 by what a row of the table is about."""
    rows = re.findall(r"^(\w+ \w+) +([01]\.\d{3}) +([01]\.\d{3})$", printed, re.MULTILINE)
    return {name: (float(accuracy), float(macro_f1)) for name, accuracy, macro_f1 in rows}


def test_the_lightning_program_trains_logs_and_leaves_a_model_that_transformers_loads(
    example: Example, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example("lightning_module.py", "--labels", "2", "--texts", "160", "--epochs", "2", "--output_dir", "out")
    printed = capsys.readouterr().out
    assert set(scores_in(printed)) == {"majority label", "this model"}
    assert re.search(r'^".* \.\.\." comes from \w+$', printed, re.MULTILINE)
    with (tmp_path / "out" / "log" / "version_0" / "metrics.csv").open(newline="") as file:
        assert {"train_loss", "val_loss", "val_accuracy", "val_macro_f1"} <= set(csv.DictReader(file).fieldnames or ())
    assert len(list((tmp_path / "out" / "checkpoints").iterdir())) == 1
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_the_command_line_trains_and_validates_from_its_checkpoint(
    example: Example, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jsonargparse")
    small = ["--data.labels=2", "--data.texts=96"]
    example("lightning_cli.py", "fit", *small, "--model.args.learning_rate=1e-3", "--trainer.max_epochs=1")
    (written,) = tmp_path.glob("runs/lightning_cli/**/config.yaml")
    assert "learning_rate: 0.001" in written.read_text()
    checkpoint = tmp_path / "runs" / "lightning_cli" / "checkpoints" / "last.ckpt"
    capsys.readouterr()
    example("lightning_cli.py", "validate", *small, "--ckpt_path", str(checkpoint))
    assert {"val_loss", "val_accuracy", "val_macro_f1"} <= set(re.findall(r"\bval_\w+", capsys.readouterr().out))


def test_the_average_and_the_profile_are_shown_beside_the_plain_training(
    example: Example, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lightning", minversion="2.6")
    example("ema_and_profiler.py", "--labels", "2", "--texts", "160", "--epochs", "2", "--output_dir", "out")
    printed = capsys.readouterr().out
    assert set(scores_in(printed)) == {"majority label", "last weights", "averaged weights"}
    assert re.search(r"^ +\d+\.\d\d +\d+  run_training_epoch$", printed, re.MULTILINE)
    assert (tmp_path / "out" / "model.safetensors").is_file()
