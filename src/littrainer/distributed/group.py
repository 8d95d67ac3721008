"""The default process group: how the processes find each other, and the library that connects them on their device."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from littrainer.distributed import environment
from littrainer.distributed.collectives import connect_hosts
from littrainer.distributed.failures import report_errors

GLOO, NCCL, MPI = "gloo", "nccl", "mpi"
# Both at once: what lies on the host is exchanged over gloo, and no GPU is waited for.
NCCL_AND_GLOO = "cpu:gloo,cuda:nccl"
GLOO_SHUTDOWN_S = 0.1
# Variables that DeepSpeed's engine reads, for a process that no launcher has started.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
# The default group whose processes leave word of the error that ends them.
_reporting_group: Any = None


class RendezvousError(RuntimeError):
    """The processes have not found each other."""


def ensure_process_group(args: Any) -> None:
    """Bring the default process group up, unless it is up, or one process alone was started without a launcher.

    All processes call this, and each waits for the others, at most `ddp_timeout` seconds. On GPUs, tensors on the host
    can be exchanged too, over gloo.
    """
    rank, world_size = environment.rank(), environment.world_size()
    if is_up():
        size = dist.get_world_size()
        if size not in (1, world_size):
            raise RuntimeError(
                f"The process group that is up has {size} processes, and {environment.WORLD_SIZE}="
                f"{os.environ.get(environment.WORLD_SIZE, '')} in the environment says {world_size}. Start the script "
                "with `littrainer run --devices` or torchrun, or set RANK, WORLD_SIZE and LOCAL_RANK before "
                "TrainingArguments are made."
            )
        _report_errors()
        return
    environment.check_ranks()
    if world_size == 1 and not (environment.is_launched() and environment.get_rendezvous_point()):
        return
    device, timeout = args.device, args.ddp_timeout_delta
    backend = choose_backend(device.type, args.ddp_backend)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == MPI:
        # MPI knows its processes itself.
        dist.init_process_group(MPI, timeout=timeout)
    elif world_size == 1:
        # A single process needs no port, which another training may have.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        _meet(backend, rank, world_size, timeout)
        _report_errors()
        # All are here. Later one of them may have failed, and the others would wait until the timeout.
        connect_hosts()
    atexit.register(_end_group, os.getpid())


def _meet(backend: str, rank: int, world_size: int, timeout: timedelta) -> None:
    """Wait until all processes are there, and bring their group up."""
    point = environment.get_rendezvous_point()
    if point is None:
        raise RendezvousError(
            f"{world_size} processes ({environment.WORLD_SIZE}) are to work together, and {environment.MAIN_ADDRESS}, "
            "which says where the first of them is found, is not set. Start the script with `littrainer run --devices` "
            f"or torchrun, or set {environment.MAIN_ADDRESS} and {environment.MAIN_PORT} in each process."
        )
    os.environ[environment.MAIN_PORT] = str(point.port)
    try:
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout)
    except dist.DistError as error:
        reason = str(error).strip().partition("\n")[0]
        if "in use" in reason or "EADDRINUSE" in reason:
            raise RendezvousError(
                f"Port {point.port} of this machine is in use, perhaps by another training, so that the {world_size} "
                f"processes cannot meet there. Choose another one: `littrainer run --main-port`, torchrun's "
                f"--master-port, or {environment.MAIN_PORT}."
            ) from error
        raise RendezvousError(
            f"Process {rank} of {world_size} has not met all others at {point} ({environment.MAIN_ADDRESS}, "
            f"{environment.MAIN_PORT}) within {timeout.total_seconds():g} s (ddp_timeout): {reason}. Look at what they "
            "wrote last, and whether a firewall leaves the port open; on several nodes, start the script on each with "
            "the same --nodes, --main-address and --main-port, and with another --node-rank."
        ) from error


def start_deepspeed_communication(args: Any) -> None:
    """Bring the process group up, and let DeepSpeed communicate over it."""
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
        # The engine communicates even if it is alone.
        for name, value in ALONE.items():
            os.environ.setdefault(name, value)
        dist.init_process_group(
            choose_backend(device.type, args.ddp_backend), store=dist.HashStore(), rank=0, world_size=1
        )
    deepspeed.init_distributed(
        dist_backend=dist.get_backend(), timeout=args.ddp_timeout_delta, auto_mpi_discovery=False
    )


def is_up() -> bool:
    """Return whether there is a default process group."""
    return dist.is_available() and dist.is_initialized()


def choose_backend(device_type: str, wanted: str | None) -> str:
    """Return the communication library, or libraries, for tensors on a device; by default what fits the device."""
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


def _report_errors() -> None:
    """Let the processes of the group that is up leave word of the errors that end them, unless they do."""
    global _reporting_group
    if _reporting_group is dist.group.WORLD or dist.get_world_size() == 1 or MPI in dist.get_backend():
        return
    # torch has no public name for the store that all processes share.
    store = dist.PrefixStore("littrainer", dist.distributed_c10d._get_default_store())
    report_errors(store, dist.get_rank(), dist.get_world_size())
    _reporting_group = dist.group.WORLD


def _end_group(process_number: int) -> None:
    # A forked child is in no group.
    if os.getpid() != process_number or not is_up():
        return
    # Gloo's threads take Python's lock to let go of the last tensors. One that comes after Python's end is aborted, and
    # the process with it.
    time.sleep(GLOO_SHUTDOWN_S)
    # If an error ends this process, the others may be waiting in a collective.
    if getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()
