"""What arguments say about their process, its device and accelerate's state."""

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


def play(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int, local_rank: int) -> None:
    """Let this process be one of several."""
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size), ("LOCAL_RANK", local_rank)):
        monkeypatch.setenv(name, str(value))


def test_ranks_come_from_the_launchers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    args = TrainingArguments()
    assert (args.world_size, args.process_index, args.local_process_index, args.local_rank) == (1, 0, 0, -1)
    assert args.parallel_mode is ParallelMode.NOT_PARALLEL and args.should_log and args.should_save
    play(monkeypatch, 5, 8, 1)
    args = TrainingArguments(log_level="debug", log_level_replica="error")
    # Scripts of transformers 4 read `local_rank`.
    assert (args.world_size, args.process_index, args.local_process_index, args.local_rank) == (8, 5, 1, 1)
    assert args.parallel_mode is ParallelMode.DISTRIBUTED and not args.should_log and not args.should_save
    assert args.get_process_log_level() == logging.ERROR
    # The first process of a later node.
    play(monkeypatch, 4, 8, 0)
    assert TrainingArguments().should_log and not TrainingArguments().should_save
    turned_round = TrainingArguments(log_on_each_node=False, save_on_each_node=True)
    assert not turned_round.should_log and turned_round.should_save
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match="RANK='first' must be a whole number"):
        _ = TrainingArguments().process_index


@pytest.mark.parametrize(
    ("gpus", "metal", "local_rank", "device"),
    [
        (1, False, None, "cuda:0"),
        (4, True, 3, "cuda:3"),
        # A launcher may show each process its own alone.
        (1, False, 3, "cuda:0"),
        (0, True, None, "mps"),
        # No library connects processes on Metal.
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
        play(monkeypatch, local_rank, 4, local_rank)
    args = TrainingArguments()
    assert (args.device, args.n_gpu) == (torch.device(device), int(device != "cpu"))
    # `.cuda()` without an index means the process's own.
    assert chosen == ([torch.device(device)] if gpus and local_rank else [])
    assert TrainingArguments(use_cpu=True).device == torch.device("cpu")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert TrainingArguments().device == torch.device("cpu")


def test_more_processes_than_gpus_on_a_node_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    play(monkeypatch, 2, 3, 2)
    with pytest.raises(ValueError, match="3 processes on this node share 2 GPUs, and process 2 has none"):
        _ = TrainingArguments().device


def test_the_device_is_found_once_and_stays_behind_when_arguments_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    args = TrainingArguments()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert args.device == torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert args.device == torch.device("cuda:0")
    # So does a state that a script has set.
    args.distributed_state = own = object()
    assert args.distributed_state is own
    for travelled in (pickle.loads(pickle.dumps(args)), copy.copy(args), copy.deepcopy(args)):
        assert "_distributed_state" not in vars(travelled)
        assert travelled.device == torch.device("cpu")
        assert travelled == args


def test_the_log_level_is_the_number_that_transformers_gives() -> None:
    for level in ("passive", "detail", "debug", "info", "warning", "error", "critical"):
        ours, theirs = TrainingArguments(log_level=level), transformers.TrainingArguments(log_level=level)
        assert ours.get_process_log_level() == theirs.get_process_log_level()


def test_several_processes_without_a_process_group_are_told_to_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(RuntimeError, match=r"main_process_first: 2 processes have no process group .* RANK is not set"),
        TrainingArguments().main_process_first(),
    ):
        raise AssertionError("the block must not run")


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, generation: int | None, has_bf16: bool = True) -> None:
    """Let torch see an NVIDIA GPU of a generation (8 is Ampere), or none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: generation is not None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: has_bf16)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=generation))
    monkeypatch.setattr(torch.version, "cuda", None if generation is None else "12.8")


def test_bfloat16_and_tf32_need_a_gpu_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for generation, has_bf16 in ((None, True), (7, False)):
        pretend_gpu(monkeypatch, generation, has_bf16)
        for name in ("bf16", "bf16_full_eval"):
            with pytest.raises(ValueError, match=rf"^{name}=True needs a GPU.*use_cpu=True"):
                TrainingArguments(**{name: True})
            TrainingArguments(**{name: True}, use_cpu=True)
        with pytest.raises(ValueError, match="tf32=True needs an NVIDIA GPU"):
            TrainingArguments(tf32=True)
    pretend_gpu(monkeypatch, 8)
    TrainingArguments(bf16=True, bf16_full_eval=True)


@pytest.fixture
def tf32_switches() -> Iterator[Callable[[], list[str]]]:
    """Return the newer switches as they are, and put all of them back afterwards."""
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
    # A script may have set another one.
    torch.set_float32_matmul_precision("medium" if expected != "none" else "highest")
    pretend_gpu(monkeypatch, 8)
    TrainingArguments(**keywords)
    if expected == "none":
        assert torch.backends.fp32_precision == expected
    else:
        assert set(tf32_switches()) == {expected}
    # Lightning and others read the older ones.
    assert torch.get_float32_matmul_precision() == ("high" if expected == "tf32" else "highest")
    assert torch.backends.cuda.matmul.allow_tf32 is (expected == "tf32")
    assert torch.backends.cudnn.allow_tf32 is (expected != "ieee")


def test_a_training_runs_where_a_script_has_set_the_newer_switch_for_tf32_alone(
    tmp_path: Path, tf32_switches: Callable[[], list[str]]
) -> None:
    torch.backends.fp32_precision = "tf32"
    before = tf32_switches()
    trainer = quiet_trainer(tmp_path, log_speed=True)
    trainer.train()
    # Lightning reads it on a GPU.
    assert torch.get_float32_matmul_precision() == "high"
    assert tf32_switches() == before


def test_a_launchers_mixed_precision_counts_where_the_arguments_name_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    pretend_gpu(monkeypatch, 8)
    assert [TrainingArguments(bf16=bf16).mixed_precision for bf16 in (False, True)] == ["fp16", "bf16"]


def test_a_state_that_says_otherwise_is_made_anew_unless_it_is_the_configured_one() -> None:
    PartialState._shared_state["num_processes"] = 7
    configured = TrainingArguments("out", use_cpu=True, accelerator_config={"use_configured_state": True})
    assert configured.distributed_state.num_processes == 7
    args = TrainingArguments("out", use_cpu=True)
    assert args.distributed_state.num_processes == 1


def test_arguments_of_one_of_several_processes_wait_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    play(monkeypatch, 1, 2, 1)
    args = TrainingArguments("out", use_cpu=True)
    assert not PartialState._shared_state and distributed_type(args) == "MULTI_CPU"


def test_kinds_of_set_ups_equal_accelerates_and_are_json() -> None:
    from accelerate.state import DistributedType as Theirs

    for member in DistributedType:
        assert member == Theirs[member.name] and Theirs[member.name] == member
        assert hash(member) == hash(Theirs[member.name]) and str(member) == str(Theirs[member.name])
    assert json.dumps(DistributedType.NO) == '"NO"'
