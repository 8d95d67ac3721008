"""The GPU trainings of this folder, on the CPU as far as possible."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import littrainer
from littrainer.strategies.choice import strategy_name
from tests.gpu import trainings
from tests.gpu.trainings import SIDES, SPREAD, TRAININGS

ALONE = ["bf16", "waits in whole steps", "batches", "memory reserved by evaluations", "peak memory"]


@pytest.mark.parametrize("name", ALONE)
def test_a_training_finds_the_same_on_both_sides(tmp_path: Path, name: str) -> None:
    ours, theirs = (TRAININGS[name](importlib.import_module(side), tmp_path, use_cpu=True) for side in SIDES.values())
    assert ours == theirs and ours is not None


def test_calls_that_wait_count_within_the_profiled_block_alone() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for outer, names in {
            "before": ["cudaDeviceSynchronize"],
            trainings.PROFILED_BLOCK: ["cudaEventSynchronize", "cudaLaunchKernel", "cudaStreamSynchronize"],
        }.items():
            with torch.profiler.record_function(outer):
                for name in names:
                    with torch.profiler.record_function(name):
                        torch.ones(1).sum()
    assert trainings.calls_that_wait(profiler.events()) == ["cudaEventSynchronize", "cudaStreamSynchronize"]


STRATEGIES = {"ddp": "DDP", "fsdp 2": "FSDP", "fsdp 1": "FSDP version 1", "deepspeed stage 3": "DeepSpeed"}


@pytest.mark.parametrize("name", STRATEGIES)
def test_arguments_of_two_processes_ask_for_their_strategy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if "deepspeed" in name:
        pytest.importorskip("deepspeed")
    monkeypatch.setenv("WORLD_SIZE", "2")
    arguments: dict[str, Any] = dict(SPREAD[name])
    if "deepspeed" in arguments:
        arguments["deepspeed"] = {**trainings.FILLED_BY_ARGUMENTS, **arguments["deepspeed"]}
    args = littrainer.TrainingArguments(str(tmp_path), use_cpu=True, **arguments)
    assert strategy_name(args) == STRATEGIES[name]
