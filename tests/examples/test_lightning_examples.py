"""The example of LightningCLI runs as its head says, with less to do."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from littrainer.cli import main
from tests.examples.in_one_process import EXAMPLES, use_few_texts


def test_the_command_line_trains_and_validates_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jsonargparse")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    texts: Any = importlib.import_module("local_texts")
    for name in ("source_files", "catalogues"):
        monkeypatch.setattr(texts, name, getattr(texts, name))
    use_few_texts()
    texts.read_documentation.cache_clear()

    def run(*options: str) -> None:
        monkeypatch.setattr(sys, "argv", ["lightning_cli.py", *options, "--data.labels=2", "--data.texts=96"])
        runpy.run_path(str(EXAMPLES / "lightning_cli.py"), run_name="__main__")

    run("fit", "--model.args.learning_rate=1e-3", "--trainer.max_epochs=1")
    (written,) = tmp_path.glob("runs/lightning_cli/**/config.yaml")
    assert "learning_rate: 0.001" in written.read_text()
    assert "charts: littrainer report runs/lightning_cli" in capsys.readouterr().out
    assert main(["report", "runs/lightning_cli", "--no-png"]) == 0
    checkpoint = tmp_path / "runs" / "lightning_cli" / "checkpoints" / "last.ckpt"
    capsys.readouterr()
    run("validate", "--ckpt_path", str(checkpoint))
    assert {"val_loss", "val_accuracy", "val_macro_f1"} <= set(re.findall(r"\bval_\w+", capsys.readouterr().out))
