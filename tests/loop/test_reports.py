from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import trainer_pt_utils as theirs

from littrainer.loop import reports
from littrainer.loop.reports import MemoryReport
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
    "huge": 1.5e300,
    "infinite": float("inf"),
    "negative": -2.00005,
    "is_best": True,
    "numpy": np.float64(0.123456),
    "short": np.float32(0.1),
    "days_runtime": 200000.5,
    "earlier_runtime": -3.25,
    "whole_runtime": 60,
    "freed_mem_delta": -5 * 2**20,
}


WRITABLE = {name: value for name, value in METRICS.items() if name != "short"}


def test_metrics_are_shown_as_transformers_shows_them() -> None:
    before = dict(METRICS)
    assert reports.metrics_format(METRICS) == theirs.metrics_format(METRICS)
    assert before == METRICS


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folders = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("theirs")
    args = quiet_arguments(folders[1], transformers.TrainingArguments)
    return quiet_trainer(folders[0]), transformers.Trainer(model=VectorClassifier(), args=args)


@pytest.mark.parametrize("metrics", [METRICS, {"total_flos": 1e30}], ids=["many", "flos"])
def test_the_printed_table_is_that_of_transformers(
    capsys: pytest.CaptureFixture[str], trainers: tuple[Any, Any], metrics: dict[str, Any]
) -> None:
    printed = []
    for trainer in trainers:
        trainer.log_metrics("eval", metrics)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != ""


# Values for which transformers raises.
@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("nothing", None, "None"),
        ("nested", {"f1": [0.5, 1]}, "{'f1': [0.5, 1]}"),
        ("eval_runtime", "long", "long"),
        ("eval_runtime", float("inf"), "inf"),
        ("total_flos", float("nan"), "nan"),
        ("eval_mem_share", 0.123456, "0.1235"),
    ],
)
def test_unexpected_values_are_printed_unchanged(
    capsys: pytest.CaptureFixture[str], name: str, value: Any, shown: str
) -> None:
    reports.print_metrics("eval", {name: value, "wider": "w" * 20})
    assert f"  {name} = {shown:>20}\n".replace(" ", "") in capsys.readouterr().out.replace(" ", "")


def test_results_files_are_those_that_transformers_writes(trainers: tuple[Any, Any]) -> None:
    written = []
    for trainer in trainers:
        trainer.save_metrics("train", WRITABLE)
        trainer.save_metrics("eval", {"eval_loss": 0.5, "epoch": 3.0, "nested": {"b": [1, None], "a": float("nan")}})
        trainer.save_metrics("test", {"test_loss": 0.25}, combined=False)
        folder = Path(trainer.args.output_dir)
        written.append({path.name: path.read_text() for path in folder.glob("*_results.json")})
    assert written[0] == written[1]
    assert set(written[0]) == {f"{split}_results.json" for split in ("train", "eval", "test", "all")}
    combined = json.loads(written[0]["all_results.json"])
    assert combined["epoch"] == 3.0 and combined["train_samples"] == 1200 and "test_loss" not in combined


def test_other_processes_neither_print_nor_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = quiet_trainer(tmp_path)
    monkeypatch.setattr(trainer, "is_world_process_zero", lambda: False)
    trainer.log_metrics("eval", METRICS)
    trainer.save_metrics("eval", WRITABLE)
    trainer.save_state()
    assert capsys.readouterr().out == "" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_damaged_file_of_all_results_is_named_and_not_changed(tmp_path: Path, content: str) -> None:
    (tmp_path / "all_results.json").write_text(content)
    with pytest.raises(ValueError, match=r"all_results\.json holds no metrics .*Mend it, or move it away"):
        reports.save_metrics(str(tmp_path), "eval", {"eval_loss": 0.5}, combined=True)
    assert (tmp_path / "all_results.json").read_text() == content
    assert json.loads((tmp_path / "eval_results.json").read_text()) == {"eval_loss": 0.5}


def test_a_metric_that_json_cannot_hold_is_named_before_anything_is_written(tmp_path: Path) -> None:
    reports.save_metrics(str(tmp_path), "eval", {"eval_loss": 0.5}, combined=True)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    with pytest.raises(TypeError, match=r"eval_results\.json cannot hold the metric 'eval_f1'.* float32"):
        reports.save_metrics(str(tmp_path), "eval", {"a": 1, "eval_f1": np.float32(0.5)}, combined=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


# ---- Memory ----------------------------------------------------------------------------------------------------------

MIB = 2**20


def test_allocated_and_peak_memory_of_a_stage_are_separate() -> None:
    report, metrics = MemoryReport(True), {}
    report.start("init")
    report.stop("init")
    with report.measure("train"):
        lasting = torch.ones(60 * MIB // 4)
        temporary = torch.ones(100 * MIB // 4)
        del temporary
        report.stop("train", metrics)
    assert lasting.numel()
    assert 50 * MIB < metrics["train_mem_cpu_alloc_delta"] < 90 * MIB
    assert metrics["train_mem_cpu_peaked_delta"] > 60 * MIB


def test_a_stage_is_part_of_its_outer_stage() -> None:
    report = MemoryReport(True)
    inner: dict[str, Any] = {}
    outer: dict[str, Any] = {}
    with report.measure("train"):
        with report.measure("eval"):
            report.stop("eval", inner)
        report.stop("train", outer)
    assert not inner and "train_mem_cpu_alloc_delta" in outer


def test_the_stage_after_a_failed_stage_is_reported() -> None:
    report, metrics = MemoryReport(True), {}
    with pytest.raises(KeyError), report.measure("train"):
        raise KeyError
    with report.measure("eval"):
        report.stop("eval", metrics)
    assert "eval_mem_cpu_alloc_delta" in metrics


def test_a_missing_psutil_is_named_with_the_way_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    quiet_trainer(tmp_path)
    with pytest.raises(ImportError, match=r"skip_memory_metrics=False.*pip install psutil"):
        quiet_trainer(tmp_path, skip_memory_metrics=False)
