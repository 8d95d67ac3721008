from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import trainer_pt_utils as theirs

from littrainer.training import reports
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

METRICS: dict[str, Any] = {
    "train_runtime": 3725.4589,
    "eval_runtime": 0.007,
    "init_mem_cpu_alloc_delta": 3 * 2**20 + 5,
    "total_flos": 7.5 * 2**30,
    "train_loss": 0.123456789,
    "epoch": 2.0,
    "train_samples": 1200,
    "name": "text",
    "tiny": 1e-9,
}


def test_metrics_are_shown_as_transformers_shows_them() -> None:
    before = dict(METRICS)
    assert reports.metrics_format(METRICS) == theirs.metrics_format(METRICS)
    assert before == METRICS


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folders = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("theirs")
    args = quiet_arguments(folders[1], transformers.TrainingArguments)
    return quiet_trainer(folders[0]), transformers.Trainer(model=VectorClassifier(), args=args)


@pytest.mark.parametrize("metrics", [METRICS, {"a": 1}], ids=["many", "one"])
def test_the_printed_table_is_that_of_transformers(
    capsys: pytest.CaptureFixture[str], trainers: tuple[Any, Any], metrics: dict[str, Any]
) -> None:
    printed = []
    for trainer in trainers:
        trainer.log_metrics("eval", metrics)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != ""


def test_no_metrics_are_printed_as_a_heading(capsys: pytest.CaptureFixture[str]) -> None:
    reports.print_metrics("train", {})
    assert capsys.readouterr().out == "***** train metrics *****\n"


def test_results_files_are_those_that_transformers_writes(trainers: tuple[Any, Any]) -> None:
    written = []
    for trainer in trainers:
        trainer.save_metrics("train", METRICS)
        trainer.save_metrics("eval", {"eval_loss": 0.5, "epoch": 3.0})
        trainer.save_metrics("test", {"test_loss": 0.25}, combined=False)
        folder = Path(trainer.args.output_dir)
        written.append({path.name: path.read_text() for path in folder.glob("*_results.json")})
    assert written[0] == written[1]
    assert set(written[0]) == {f"{split}_results.json" for split in ("train", "eval", "test", "all")}
    combined = json.loads(written[0]["all_results.json"])
    assert combined["epoch"] == 3.0 and combined["train_samples"] == 1200 and "test_loss" not in combined


def test_results_are_written_to_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    reports.save_metrics(str(tmp_path / "a" / "b"), "train", {"x": 1}, combined=True)
    assert (tmp_path / "a" / "b" / "all_results.json").is_file()


def test_other_processes_neither_print_nor_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = quiet_trainer(tmp_path)
    monkeypatch.setattr(trainer, "is_world_process_zero", lambda: False)
    trainer.log_metrics("eval", METRICS)
    trainer.save_metrics("eval", METRICS)
    trainer.save_state()
    assert capsys.readouterr().out == "" and list(tmp_path.iterdir()) == []
