"""The default process group: rendezvous of the processes, and choice of the backend."""

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
# Host tensors use gloo, which does not wait for a GPU.
NCCL_AND_GLOO = "cpu:gloo,cuda:nccl"
GLOO_SHUTDOWN_S = 0.1
# Variables that DeepSpeed's engine needs without a launcher.
SINGLE_PROCESS_VARIABLES = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
# The default group whose processes publish their errors.
_reporting_group: Any = None


class RendezvousError(RuntimeError):
    """The processes could not connect to each other."""


def ensure_process_group(args: Any) -> None:
    """Initialize the default process group, unless it exists or a single process runs without a launcher.

    A collective call, which waits at most `ddp_timeout` seconds. With NCCL, host tensors can be exchanged over gloo.
    """
    rank, world_size = environment.rank(), environment.world_size()
    if is_initialized():
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
        # MPI's launcher sets ranks and addresses.
        dist.init_process_group(MPI, timeout=timeout)
    elif world_size == 1:
        # A single process needs no port, which another training may use.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        _rendezvous(backend, rank, world_size, timeout)
        _report_errors()
        # Connect now: after a failure the others would wait until the timeout.
        connect_hosts()
    atexit.register(_end_group, os.getpid())


def _rendezvous(backend: str, rank: int, world_size: int, timeout: timedelta) -> None:
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
    deepspeed: Any = importlib.import_module("deepspeed")
    engine_device = importlib.import_module("deepspeed.accelerator").get_accelerator().device_name()
    device = args.device
    if engine_device != device.type:
        raise RuntimeError(
            f"DeepSpeed works on {engine_device}, and this training on {device.type}: "
            f"{'set use_cpu=True' if engine_device == 'cpu' else 'leave use_cpu unset'}, or start the script with the "
            f"environment variable DS_ACCELERATOR={device.type}."
        )
    ensure_process_group(args)
    if not is_initialized():
        for name, value in SINGLE_PROCESS_VARIABLES.items():
            os.environ.setdefault(name, value)
        dist.init_process_group(
            choose_backend(device.type, args.ddp_backend), store=dist.HashStore(), rank=0, world_size=1
        )
    deepspeed.init_distributed(
        dist_backend=dist.get_backend(), timeout=args.ddp_timeout_delta, auto_mpi_discovery=False
    )


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def choose_backend(device_type: str, requested: str | None) -> str:
    backend = requested or (NCCL if device_type == "cuda" else GLOO)
    if backend == NCCL and device_type != "cuda":
        raise ValueError(
            f'ddp_backend="nccl" connects NVIDIA GPUs, and the device is {device_type!r}; leave ddp_backend unset, or '
            'set it to "gloo".'
        )
    if not dist.is_backend_available(backend):
        source = f'ddp_backend="{backend}"' if requested else f'"{backend}", which {device_type} needs,'
        available = [name for name in (GLOO, NCCL, MPI) if dist.is_backend_available(name)]
        raise ValueError(
            f"{source} is not in this build of torch (it has {', '.join(available) or 'none'}). Install a build that "
            "has it, or set ddp_backend to another one."
        )
    return NCCL_AND_GLOO if backend == NCCL and dist.is_backend_available(GLOO) else backend


def _report_errors() -> None:
    global _reporting_group
    if _reporting_group is dist.group.WORLD or dist.get_world_size() == 1 or MPI in dist.get_backend():
        return
    store = dist.PrefixStore("littrainer", dist.distributed_c10d._get_default_store())
    report_errors(store, dist.get_rank(), dist.get_world_size())
    _reporting_group = dist.group.WORLD


def _end_group(pid: int) -> None:
    # Forked children are not in the group.
    if os.getpid() != pid or not is_initialized():
        return
    # Gloo's threads abort the process if they release their last tensors after Python's shutdown.
    time.sleep(GLOO_SHUTDOWN_S)
    # After an error the other processes may wait in a collective, and would block this call.
    if getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()
