"""The default process group: how the processes find each other, and the library that connects them on their device."""

from __future__ import annotations

import atexit
import importlib
import itertools
import os
import socket
import sys
import time
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from littrainer.distributed import environment
from littrainer.distributed.agreement import connect_hosts
from littrainer.distributed.environment import MeetingPoint
from littrainer.distributed.failure_report import report_errors

GLOO, NCCL, MPI = "gloo", "nccl", "mpi"
# Both at once: what lies on the host is exchanged over gloo, and no GPU is waited for.
NCCL_AND_GLOO = "cpu:gloo,cuda:nccl"
SECONDS_FOR_GLOO_TO_FINISH = 0.1
# torchrun's agent holds the store, and no process of its own has to.
AGENT_HOLDS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
ARRIVALS, COMPLETE = "arrivals", "complete"
# What DeepSpeed's engine reads of a process that no launcher has started.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
# Numbers the process groups of this process.
_groups = itertools.count()
# The default group whose processes leave word of the error that ends them.
_reporting_group: Any = None


class GroupArguments(Protocol):
    """What training arguments say about a process group."""

    @property
    def device(self) -> torch.device:
        """Where this process computes."""

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """How long processes wait for each other."""

    @property
    def ddp_backend(self) -> str | None:
        """The communication library; None takes what fits the device."""


class RendezvousError(RuntimeError):
    """The processes have not found each other."""


def ensure_process_group(args: GroupArguments) -> None:
    """Bring the default process group up, unless it is, or there is one process and nobody has launched it.

    All processes have to come here; each waits for the others, at most `ddp_timeout` seconds. A group that somebody
    else has brought up is left alone. On GPUs, tensors on the host can be exchanged too, over gloo.

    Raises:
        ValueError: ranks, backend or port that cannot be.
        RuntimeError: the processes do not find each other; the message says which is missing, and where it was looked
            for.
    """
    rank, world_size = environment.rank(), environment.world_size()
    if is_up():
        _check_size(world_size)
        _report_errors()
        return
    environment.check_ranks()
    if world_size == 1 and not (environment.is_launched() and environment.meeting_point()):
        return
    device, timeout = args.device, args.ddp_timeout_delta
    backend = backend_for(device.type, args.ddp_backend)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == MPI:
        # MPI knows its processes itself.
        dist.init_process_group(MPI, timeout=timeout)
    else:
        # One process alone needs no port, which another training may have.
        store: Any = rendezvous(rank, world_size, timeout) if world_size > 1 else dist.HashStore()
        if NCCL in backend:
            claim_gpu(store, rank, str(torch.cuda.get_device_properties(device).uuid))
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        if world_size > 1:
            _report_errors(store)
            # All are here. Later one of them may have failed, and the others would wait until the timeout.
            connect_hosts()
    atexit.register(_end_group, os.getpid())


def start_deepspeed_communication(args: GroupArguments) -> None:
    """Bring the process group up, and let DeepSpeed communicate over it.

    Raises:
        RuntimeError: DeepSpeed works on another kind of device than the training.
    """
    deepspeed: Any = importlib.import_module("deepspeed")
    works_on, device = importlib.import_module("deepspeed.accelerator").get_accelerator().device_name(), args.device
    if works_on != device.type:
        raise RuntimeError(
            f"DeepSpeed works on {works_on}, and this training on {device.type}: "
            f"{'set use_cpu=True' if works_on == 'cpu' else 'leave use_cpu unset'}, or start the script with the "
            f"environment variable DS_ACCELERATOR={device.type}."
        )
    ensure_process_group(args)
    if not is_up():
        # The engine communicates even where it is alone.
        for name, value in ALONE.items():
            os.environ.setdefault(name, value)
        dist.init_process_group(
            backend_for(device.type, args.ddp_backend), store=dist.HashStore(), rank=0, world_size=1
        )
    deepspeed.init_distributed(
        dist_backend=dist.get_backend(), timeout=args.ddp_timeout_delta, auto_mpi_discovery=False
    )


def is_up() -> bool:
    """Whether there is a default process group."""
    return dist.is_available() and dist.is_initialized()


def backend_for(device_type: str, wanted: str | None) -> str:
    """The communication library, or libraries, for tensors on a device.

    Parameters:
        device_type: "cuda", "cpu" and so on.
        wanted: `ddp_backend`; None takes what fits the device.

    Raises:
        ValueError: the library does not work on that device, or this build of torch does not have it.
    """
    backend = wanted or (NCCL if device_type == "cuda" else GLOO)
    if backend == NCCL and device_type != "cuda":
        raise ValueError(
            f'ddp_backend="nccl" connects NVIDIA GPUs, and the device is {device_type!r}; leave ddp_backend unset, or '
            'set it to "gloo".'
        )
    if not dist.is_backend_available(backend):
        given = f'ddp_backend="{backend}"' if wanted else f'"{backend}", which {device_type} needs,'
        have = [name for name in (GLOO, NCCL, MPI) if dist.is_backend_available(name)]
        raise ValueError(
            f"{given} is not in this build of torch (it has {', '.join(have) or 'none'}). Install a build that has it, "
            "or set ddp_backend to another one."
        )
    return NCCL_AND_GLOO if backend == NCCL and dist.is_backend_available(GLOO) else backend


def claim_gpu(store: Any, rank: int, gpu: str) -> None:
    """Take a GPU for this process alone, since NCCL connects no two processes on one.

    Parameters:
        store: the one that all processes share.
        gpu: what tells it from all others.

    Raises:
        ValueError: another process has taken it; the message names that process.
    """
    owner = store.compare_set(f"gpu/{socket.gethostname()}/{gpu}", "", str(rank)).decode()
    if owner != str(rank):
        raise ValueError(
            f"Processes {owner} and {rank} use one GPU of {socket.gethostname()}, and NCCL connects no two processes "
            'on it. Start as many processes as there are GPUs, or set ddp_backend="gloo".'
        )


def _check_size(world_size: int) -> None:
    size = dist.get_world_size()
    if size != world_size and size > 1:
        raise RuntimeError(
            f"The process group that is up has {size} processes, and {environment.WORLD_SIZE}="
            f"{os.environ.get(environment.WORLD_SIZE, '')} in the environment says {world_size}. Start the script "
            "with `littrainer run --devices` or torchrun, or set RANK, WORLD_SIZE and LOCAL_RANK before "
            "TrainingArguments are made."
        )


def _report_errors(store: Any = None) -> None:
    """Let the processes of the group that is up leave word of the errors that end them, unless they do.

    Parameters:
        store: the one that all processes share; None takes that of a group which somebody else has brought up.
    """
    global _reporting_group
    if _reporting_group is dist.group.WORLD or dist.get_world_size() == 1 or MPI in dist.get_backend():
        return
    if store is None:
        # Not all versions of torch have a public name for it.
        store = dist.PrefixStore("littrainer", dist.distributed_c10d._get_default_store())
    report_errors(store, dist.get_rank(), dist.get_world_size())
    _reporting_group = dist.group.WORLD


def _end_group(process_number: int) -> None:
    # A forked child is in no group.
    if os.getpid() != process_number or not is_up():
        return
    # Gloo's threads take Python's lock to let go of the last tensors. One that comes after Python's end is aborted, and
    # the process with it.
    time.sleep(SECONDS_FOR_GLOO_TO_FINISH)
    # Where an error ends this process, the others may be waiting in a collective.
    if getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()


# ---- How processes find each other -----------------------------------------------------------------------------------


def rendezvous(rank: int, world_size: int, timeout: timedelta) -> Any:
    """Wait until all processes are there, and return the store that they share.

    Parameters:
        timeout: after which the waiting ends.

    Raises:
        RendezvousError: nobody says where to meet; the port is taken; the first process, or another, does not come.
    """
    point = environment.meeting_point()
    if point is None:
        raise RendezvousError(
            f"{world_size} processes ({environment.WORLD_SIZE}) are to work together, and {environment.MAIN_ADDRESS}, "
            "which says where the first of them is found, is not set. Start the script with `littrainer run --devices` "
            f"or torchrun, or set {environment.MAIN_ADDRESS} and {environment.MAIN_PORT} in each process."
        )
    # A script may end its process group and begin another one.
    prefix = f"littrainer/{os.environ.get(RESTARTS, '0')}/{next(_groups)}"
    store = dist.PrefixStore(prefix, _open_store(point, rank, world_size, timeout))
    _wait_for_all(store, point, rank, world_size, timeout)
    return store


def _open_store(point: MeetingPoint, rank: int, world_size: int, timeout: timedelta) -> Any:
    is_host = rank == 0 and os.environ.get(AGENT_HOLDS_STORE) != str(True)
    try:
        return dist.TCPStore(
            point.address,
            point.port,
            world_size,
            is_master=is_host,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
        )
    except RuntimeError as error:
        raise RendezvousError(_why_no_store(point, rank, world_size, timeout, is_host, error)) from error


def _why_no_store(
    point: MeetingPoint, rank: int, world_size: int, timeout: timedelta, is_host: bool, error: Exception
) -> str:
    if is_host:
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            return (
                f"Port {point.port} of this machine is in use, perhaps by another training, so that the {world_size} "
                f"processes cannot meet there. Choose another one: `littrainer run --main-port`, torchrun's "
                f"--master-port, or {environment.MAIN_PORT}."
            )
        reason = str(error).strip().partition("\n")[0]
        return (
            f"Process 0 cannot open port {point.port} at {point.address} ({environment.MAIN_ADDRESS}), where the "
            f"{world_size} processes are to meet: {reason}"
        )
    return (
        f"Process {rank} of {world_size} has not found the first process at {point} ({environment.MAIN_ADDRESS}, "
        f"{environment.MAIN_PORT}) within {timeout.total_seconds():g} s (ddp_timeout). Is process 0 running, is that "
        "its address, and does a firewall leave the port open?"
    )


def _wait_for_all(store: Any, point: MeetingPoint, rank: int, world_size: int, timeout: timedelta) -> None:
    try:
        own = f"process {os.getpid()} on {socket.gethostname()}"
        earlier = store.compare_set(f"arrival/{rank}", "", own).decode()
        if earlier == own:
            if store.add(ARRIVALS, 1) >= world_size:
                store.set(COMPLETE, "")
            store.wait([COMPLETE], timeout)
    except RuntimeError as error:
        raise RendezvousError(_who_is_missing(store, point, rank, world_size, timeout)) from error
    if earlier != own:
        raise RendezvousError(
            f"{environment.RANK}={rank} is given to two processes, {earlier} and {own}. Each process that makes "
            "TrainingArguments needs a rank of its own; one that a process starts must not inherit its rank."
        )


def _who_is_missing(store: Any, point: MeetingPoint, rank: int, world_size: int, timeout: timedelta) -> str:
    try:
        missing = [str(other) for other in range(world_size) if not store.check([f"arrival/{other}"])]
    except RuntimeError:
        return (
            f"Process {rank} of {world_size} has lost the connection to {point}, where all of them meet, before all "
            "were there. What process 0, or the launcher, wrote last says why."
        )
    who = "process" if len(missing) == 1 else "processes"
    return (
        f"Process {rank} waited {timeout.total_seconds():g} s (ddp_timeout) at {point} for {world_size} processes, and "
        f"{who} {', '.join(missing)} did not come. Look at what they wrote last; on several nodes, start the script on "
        "each with the same --nodes, --main-address and --main-port, and a --node-rank of its own."
    )
