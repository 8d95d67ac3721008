from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from littrainer.checkpoint import run_record
from littrainer.checkpoint.run_record import facts_of_run
from tests.scenarios.data import vector_rows
from tests.scenarios.trainers import quiet_trainer


def record_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "littrainer_run.json").read_text())


def test_a_run_that_saves_notes_data_model_code_and_strategy_before_its_first_step(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        tmp_path, max_steps=2, save_strategy="steps", save_steps=1, given={"eval_dataset": {"a": vector_rows(3)}}
    )
    trainer.train()
    first = record_in(tmp_path)
    assert first["data"]["train"]["rows"] == 10 and first["data"]["eval a"]["rows"] == 3
    assert first["model"]["class"] == "VectorClassifier"
    assert first["environment"]["strategy"] == "single device" and first["environment"]["threads"] >= 1
    assert set(first["code"]) == {"script", "script hash", "commit", "uncommitted changes"}
    # The weights have changed, and the record keeps those of the beginning.
    trainer.save_state()
    assert record_in(tmp_path) == first


def test_a_run_that_saves_nothing_leaves_no_record_unless_its_state_is_saved(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path / "run", max_steps=1)
    trainer.train()
    assert list((tmp_path / "run").iterdir()) == []
    trainer.save_state()
    assert record_in(tmp_path / "run")["data"]["train"]["rows"] == 10
    assert record_in(tmp_path / "run")["model"] == {}


def test_without_git_or_a_script_the_code_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **keywords: Any) -> Any:
        raise subprocess.TimeoutExpired("git", 1)

    monkeypatch.setattr(run_record.subprocess, "run", fail)
    monkeypatch.setattr(run_record.sys.modules["__main__"], "__file__", None, raising=False)
    monkeypatch.chdir(tmp_path)
    assert set(facts_of_run(None, {})["code"].values()) == {None}
