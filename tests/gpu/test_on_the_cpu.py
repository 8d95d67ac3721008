"""What the tests of this folder run on GPUs, run on the CPU as far as it goes there."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import littrainer
from littrainer.strategies.choice import strategy_name
from tests.gpu import trainings
from tests.gpu.trainings import SIDES, SPREAD, STEPS, STEPS_OF_SETTING_UP, TRAININGS


@pytest.fixture(params=SIDES)
def side(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(SIDES[request.param])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_curves_are_equal(tmp_path: Path, precision: str) -> None:
    found = [
        TRAININGS[precision](importlib.import_module(name), tmp_path / name, use_cpu=True) for name in SIDES.values()
    ]
    assert len(found[0]) == STEPS
    assert found[0] == found[1]


def test_waits_are_collected_in_steps_after_which_nothing_is_logged(tmp_path: Path, side: ModuleType) -> None:
    entered: list[int] = []

    @contextmanager
    def counted(found: list[str]) -> Iterator[None]:
        entered.append(len(entered))
        yield
        found.append("somewhere")

    found = trainings.waits_between_logs(side, tmp_path, counted, use_cpu=True)
    expected = list(range(STEPS_OF_SETTING_UP, STEPS - 1))
    assert found["steps"] == expected and len(found["waits"]) == len(entered) == len(expected)


def test_a_wait_is_told_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    found: list[str] = []
    with trainings.syncs_counted(found):
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert modes == ["warn", "default"]
    assert len(found) == 1 and Path(__file__).name in found[0]


def test_calls_that_wait_count_within_the_profiled_block_alone() -> None:
    found: list[str] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with torch.profiler.record_function("cudaDeviceSynchronize"):
            pass
        with torch.profiler.record_function(trainings.PROFILED_BLOCK):
            for name in ("cudaEventSynchronize", "cudaLaunchKernel", "cudaStreamSynchronize"):
                with torch.profiler.record_function(name):
                    torch.ones(1).sum()
        with torch.profiler.record_function("cudaDeviceSynchronize"):
            pass
    assert trainings.calls_that_wait(profiler.events()) == ["cudaEventSynchronize", "cudaStreamSynchronize"]
    with trainings.syncs_profiled(found), torch.profiler.record_function("cudaStreamSynchronize"):
        pass
    assert found == ["cudaStreamSynchronize"]


def test_steps_are_profiled_one_by_one(tmp_path: Path, side: ModuleType) -> None:
    found = TRAININGS["profiled waits between logs"](side, tmp_path, use_cpu=True)
    assert found["steps"] == list(range(STEPS_OF_SETTING_UP, STEPS - 1))
    assert found["waits"] == []


def test_whole_steps_are_profiled_from_one_end_to_another(tmp_path: Path, side: ModuleType) -> None:
    found = TRAININGS["profiled waits in whole steps"](side, tmp_path, use_cpu=True)
    assert found == {"steps": [STEPS_OF_SETTING_UP + 1, STEPS_OF_SETTING_UP + 2], "waits": []}


def test_batches_of_training_and_evaluation_are_noted_as_steps_get_them(tmp_path: Path) -> None:
    ours, theirs = (
        TRAININGS["batches"](importlib.import_module(name), tmp_path, use_cpu=True) for name in SIDES.values()
    )
    assert ours == theirs
    # Four steps of two micro-batches, and ten rows by eights.
    assert [len(ours[non_blocking]["batches"]) for non_blocking in (False, True)] == [4 * 2 + 2] * 2


def test_reserved_memory_is_read_after_few_and_after_many_evaluations(tmp_path: Path) -> None:
    found = trainings.reserved_by_evaluations(littrainer, tmp_path, use_cpu=True)
    assert len(found) == 2 and (found == [0, 0] or torch.cuda.is_available())


def test_the_peak_is_measured_around_a_training(tmp_path: Path, side: ModuleType) -> None:
    measured = trainings.peak_memory(side, tmp_path, use_cpu=True)
    assert measured == 0 or torch.cuda.is_available()


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("ddp", "DDP"),
        ("fsdp 2", "FSDP"),
        ("fsdp 1", "FSDP version 1"),
        ("deepspeed stage 2", "DeepSpeed"),
        ("deepspeed stage 3", "DeepSpeed"),
    ],
)
def test_arguments_of_two_processes_ask_for_their_strategy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, strategy: str
) -> None:
    if strategy == "DeepSpeed":
        pytest.importorskip("deepspeed")
    monkeypatch.setenv("WORLD_SIZE", "2")
    arguments: dict[str, Any] = dict(SPREAD[name])
    if "deepspeed" in arguments:
        arguments["deepspeed"] = {**trainings.LEFT_TO_ARGUMENTS, **arguments["deepspeed"]}
    assert strategy_name(littrainer.TrainingArguments(str(tmp_path), use_cpu=True, **arguments)) == strategy


def test_one_process_saves_a_model_that_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    found = TRAININGS["ddp"](littrainer, tmp_path, use_cpu=True)
    assert len(found) == STEPS
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
