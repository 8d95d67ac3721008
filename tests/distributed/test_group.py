from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from littrainer import Trainer, TrainingArguments
from littrainer.distributed.group import RendezvousError, choose_backend, ensure_process_group
from tests.distributed.launchers import set_only
from tests.distributed.process_launch import find_free_port
from tests.distributed.starting import run_by_hand


@pytest.fixture
def no_group() -> Iterator[None]:
    """Destroy the test's process group."""
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch, no_group: None) -> TrainingArguments:
    set_only(monkeypatch)
    return TrainingArguments("out", use_cpu=True, ddp_timeout=5)


def set_backends(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let torch report these backends as available."""
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name in names)


@pytest.mark.parametrize(
    ("device", "requested", "backend"),
    [
        ("cpu", None, "gloo"),
        ("cpu", "gloo", "gloo"),
        ("cpu", "mpi", "mpi"),
        ("cuda", None, "cpu:gloo,cuda:nccl"),
        ("cuda", "nccl", "cpu:gloo,cuda:nccl"),
        ("cuda", "gloo", "gloo"),
        ("xpu", "xccl", "xccl"),
    ],
)
def test_the_communication_library_fits_the_device(
    monkeypatch: pytest.MonkeyPatch, device: str, requested: str | None, backend: str
) -> None:
    set_backends(monkeypatch, "gloo", "nccl", "mpi", "xccl")
    assert choose_backend(device, requested) == backend


@pytest.mark.parametrize(
    ("device", "requested", "available", "complaint"),
    [
        ("cpu", "nccl", ["gloo", "nccl"], "ddp_backend=\"nccl\" connects NVIDIA GPUs, and the device is 'cpu'"),
        ("cuda", None, ["gloo"], '"nccl", which cuda needs, is not in this build of torch .it has gloo'),
        ("cpu", "mpi", ["gloo"], 'ddp_backend="mpi" is not in this build of torch'),
    ],
)
def test_unsuitable_and_missing_backends_are_named(
    monkeypatch: pytest.MonkeyPatch, device: str, requested: str | None, available: list[str], complaint: str
) -> None:
    set_backends(monkeypatch, *available)
    with pytest.raises(ValueError, match=complaint):
        choose_backend(device, requested)


def test_arguments_of_a_single_launched_process_create_a_group_without_a_port(
    monkeypatch: pytest.MonkeyPatch, no_group: None
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        set_only(monkeypatch, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        args = TrainingArguments("out", use_cpu=True, ddp_timeout=7)
    assert dist.get_backend() == "gloo" and dist.get_world_size() == 1 and args.local_rank == 0
    gloo: Any = dist.group.WORLD
    assert gloo._get_backend(torch.device("cpu")).options._timeout == args.ddp_timeout_delta


def test_an_existing_group_is_used_if_its_size_matches_the_environment(
    arguments: TrainingArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before = dist.group.WORLD
    set_only(monkeypatch, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    ensure_process_group(arguments)
    assert dist.group.WORLD is before
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    with pytest.raises(RuntimeError, match=r"group that is up has 4 processes, and WORLD_SIZE=1 .*says 1"):
        ensure_process_group(arguments)


def test_several_processes_without_an_address_are_refused_by_the_trainer(
    arguments: TrainingArguments, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_only(monkeypatch, RANK="0", WORLD_SIZE="2", LOCAL_RANK="0")
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(RuntimeError, match="MASTER_ADDR, which says where the first of them is found, is not set"):
        Trainer(torch.nn.Linear(1, 1), args)


def test_processes_can_end_right_after_a_collective(tmp_path: Path) -> None:
    # Gloo's threads do not get Python's lock before the shutdown.
    script = """
import sys
from littrainer import TrainingArguments
from littrainer.distributed.collectives import all_reduce_max
TrainingArguments(use_cpu=True).device
all_reduce_max(1)
sys.setswitchinterval(60)
all_reduce_max(2)
"""
    (tmp_path / "script.py").write_text(script)
    for status, output in run_by_hand(tmp_path / "script.py"):
        assert status == 0, output


@pytest.mark.parametrize(("rank", "size"), [(0, 3), (1, 2)], ids=["another does not come", "the first does not come"])
def test_the_rendezvous_of_missing_processes_times_out(
    arguments: TrainingArguments, monkeypatch: pytest.MonkeyPatch, rank: int, size: int
) -> None:
    arguments.ddp_timeout = 1
    port = find_free_port()
    set_only(monkeypatch, RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    complaint = rf"Process {rank} of {size} has not met all others at 127\.0\.0\.1:{port} .* within 1 s \(ddp_timeout\)"
    with pytest.raises(RendezvousError, match=complaint):
        ensure_process_group(arguments)


def test_an_error_says_how_to_replace_a_port_in_use(
    arguments: TrainingArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        set_only(monkeypatch, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        with pytest.raises(RendezvousError, match=f"Port {port} of this machine is in use.*--main-port"):
            ensure_process_group(arguments)
