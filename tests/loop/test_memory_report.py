from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer.loop.reports import MemoryReport
from tests.scenarios.trainers import quiet_trainer

MIB = 2**20


def test_what_a_stage_keeps_and_what_it_only_held_for_a_while_are_told_apart() -> None:
    report, metrics = MemoryReport(True), {}
    report.start("init")
    report.stop("init")
    with report.measure("train"):
        kept = torch.ones(60 * MIB // 4)
        passing = torch.ones(100 * MIB // 4)
        del passing
        report.stop("train", metrics)
    assert kept.numel()
    assert 50 * MIB < metrics["train_mem_cpu_alloc_delta"] < 90 * MIB
    assert metrics["train_mem_cpu_peaked_delta"] > 60 * MIB


def test_a_stage_within_another_one_is_part_of_it() -> None:
    report = MemoryReport(True)
    inner: dict[str, Any] = {}
    outer: dict[str, Any] = {}
    with report.measure("train"):
        with report.measure("eval"):
            report.stop("eval", inner)
        report.stop("train", outer)
    assert not inner and "train_mem_cpu_alloc_delta" in outer


def test_a_stage_that_fails_does_not_swallow_the_next_one() -> None:
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
