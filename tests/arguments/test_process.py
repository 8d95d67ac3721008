"""Device, ranks, TF32 and accelerate's state of arguments."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, PartialState

from littrainer.arguments import TrainingArguments
from littrainer.arguments.choices import ParallelMode
from littrainer.arguments.process import DistributedType, distributed_type
from tests.scenarios.trainers import quiet_trainer


def set_ranks(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int, local_rank: int) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size), ("LOCAL_RANK", local_rank)):
        monkeypatch.setenv(name, str(value))


def test_ranks_come_from_the_launchers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    args = TrainingArguments()
    assert (args.world_size, args.process_index, args.local_process_index, args.local_rank) == (1, 0, 0, -1)
    assert args.parallel_mode is ParallelMode.NOT_PARALLEL and args.should_log and args.should_save
    set_ranks(monkeypatch, 5, 8, 1)
    args = TrainingArguments(log_level="debug", log_level_replica="error")
    assert (args.world_size, args.process_index, args.local_process_index, args.local_rank) == (8, 5, 1, 1)
    assert args.parallel_mode is ParallelMode.DISTRIBUTED and not args.should_log and not args.should_save
    assert args.get_process_log_level() == logging.ERROR
    # First process of the second node.
    set_ranks(monkeypatch, 4, 8, 0)
    assert TrainingArguments().should_log and not TrainingArguments().should_save
    args = TrainingArguments(log_on_each_node=False, save_on_each_node=True)
    assert not args.should_log and args.should_save
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match="RANK='first' must be a whole number"):
        _ = TrainingArguments().process_index


@pytest.mark.parametrize(
    ("gpus", "metal", "local_rank", "device"),
    [
        (1, False, None, "cuda:0"),
        (4, True, 3, "cuda:3"),
        # CUDA_VISIBLE_DEVICES per process.
        (1, False, 3, "cuda:0"),
        (0, True, None, "mps"),
        (0, True, 1, "cpu"),
        (0, False, None, "cpu"),
    ],
)
def test_each_process_has_the_gpu_of_its_number_before_metal_and_the_cpu(
    monkeypatch: pytest.MonkeyPatch, gpus: int, metal: bool, local_rank: int | None, device: str
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: metal)
    if local_rank is not None:
        set_ranks(monkeypatch, local_rank, 4, local_rank)
    args = TrainingArguments()
    assert (args.device, args.n_gpu) == (torch.device(device), int(device != "cpu"))
    assert chosen == ([torch.device(device)] if gpus and local_rank else [])
    assert TrainingArguments(use_cpu=True).device == torch.device("cpu")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert TrainingArguments().device == torch.device("cpu")


def test_more_processes_than_gpus_on_a_node_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    set_ranks(monkeypatch, 2, 3, 2)
    with pytest.raises(ValueError, match="3 processes on this node share 2 GPUs, and process 2 has none"):
        _ = TrainingArguments().device


def test_the_device_is_cached_and_excluded_from_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    args = TrainingArguments()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert args.device == torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert args.device == torch.device("cuda:0")
    args.distributed_state = state = object()
    assert args.distributed_state is state
    for copied in (pickle.loads(pickle.dumps(args)), copy.copy(args), copy.deepcopy(args)):
        assert "_distributed_state" not in vars(copied)
        assert copied.device == torch.device("cpu")
        assert copied == args


def test_the_log_level_is_the_number_that_transformers_gives() -> None:
    for level in ("passive", "detail", "debug", "info", "warning", "error", "critical"):
        ours, theirs = TrainingArguments(log_level=level), transformers.TrainingArguments(log_level=level)
        assert ours.get_process_log_level() == theirs.get_process_log_level()


def test_main_process_first_without_a_process_group_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(RuntimeError, match=r"main_process_first: 2 processes have no process group .* RANK is not set"),
        TrainingArguments().main_process_first(),
    ):
        raise AssertionError("the block must not run")


def simulate_gpu(monkeypatch: pytest.MonkeyPatch, generation: int | None, has_bf16: bool = True) -> None:
    """Simulate an NVIDIA GPU of a generation (8 is Ampere), or none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: generation is not None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: has_bf16)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=generation))
    monkeypatch.setattr(torch.version, "cuda", None if generation is None else "12.8")


def test_bfloat16_and_tf32_need_a_gpu_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for generation, has_bf16 in ((None, True), (7, False)):
        simulate_gpu(monkeypatch, generation, has_bf16)
        for name in ("bf16", "bf16_full_eval"):
            with pytest.raises(ValueError, match=rf"^{name}=True needs a GPU.*use_cpu=True"):
                TrainingArguments(**{name: True})
            TrainingArguments(**{name: True}, use_cpu=True)
        with pytest.raises(ValueError, match="tf32=True needs an NVIDIA GPU"):
            TrainingArguments(tf32=True)
    simulate_gpu(monkeypatch, 8)
    TrainingArguments(bf16=True, bf16_full_eval=True)


@pytest.fixture
def tf32_switches() -> Iterator[Callable[[], list[str]]]:
    """Return a function that reads the newer switches; restore all switches."""
    backends = torch.backends
    switches = [backends, backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul]
    yield lambda: [switch.fp32_precision for switch in switches]
    backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = True
    backends.cuda.matmul.fp32_precision = backends.mkldnn.matmul.fp32_precision = "none"


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({"tf32": True}, "tf32"),
        ({"tf32": False}, "ieee"),
        ({}, "none"),
        ({"torch_compile_backend": "eager"}, "tf32"),
        ({"torch_compile_backend": "eager", "fp16": True}, "none"),
        ({"torch_compile_backend": "eager", "tf32": False}, "ieee"),
    ],
    ids=str,
)
def test_the_switch_for_tf32_is_set_as_asked_and_by_compilation(
    monkeypatch: pytest.MonkeyPatch, tf32_switches: Callable[[], list[str]], keywords: dict[str, Any], expected: str
) -> None:
    torch.set_float32_matmul_precision("medium" if expected != "none" else "highest")
    simulate_gpu(monkeypatch, 8)
    TrainingArguments(**keywords)
    if expected == "none":
        assert torch.backends.fp32_precision == expected
    else:
        assert set(tf32_switches()) == {expected}
    # Older switches.
    assert torch.get_float32_matmul_precision() == ("high" if expected == "tf32" else "highest")
    assert torch.backends.cuda.matmul.allow_tf32 is (expected == "tf32")
    assert torch.backends.cudnn.allow_tf32 is (expected != "ieee")


def test_a_training_runs_if_a_script_has_set_only_the_newer_switch_for_tf32(
    tmp_path: Path, tf32_switches: Callable[[], list[str]]
) -> None:
    torch.backends.fp32_precision = "tf32"
    before = tf32_switches()
    trainer = quiet_trainer(tmp_path, log_speed=True)
    trainer.train()
    assert torch.get_float32_matmul_precision() == "high"
    assert tf32_switches() == before


def test_mixed_precision_of_the_launcher_is_used_without_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    simulate_gpu(monkeypatch, 8)
    assert [TrainingArguments(bf16=bf16).mixed_precision for bf16 in (False, True)] == ["fp16", "bf16"]


def test_a_different_partial_state_is_replaced_unless_it_is_configured() -> None:
    PartialState._shared_state["num_processes"] = 7
    configured = TrainingArguments("out", use_cpu=True, accelerator_config={"use_configured_state": True})
    assert configured.distributed_state.num_processes == 7
    args = TrainingArguments("out", use_cpu=True)
    assert args.distributed_state.num_processes == 1


def test_arguments_do_not_wait_for_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    set_ranks(monkeypatch, 1, 2, 1)
    args = TrainingArguments("out", use_cpu=True)
    assert not PartialState._shared_state and distributed_type(args) == "MULTI_CPU"


def test_distributed_types_equal_those_of_accelerate_and_serialize() -> None:
    from accelerate.state import DistributedType as Theirs

    for member in DistributedType:
        assert member == Theirs[member.name] and Theirs[member.name] == member
        assert hash(member) == hash(Theirs[member.name]) and str(member) == str(Theirs[member.name])
    assert json.dumps(DistributedType.NO) == '"NO"'
