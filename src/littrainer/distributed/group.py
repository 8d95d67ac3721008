"""The default process group: brought up once, over the library that fits the device."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from littrainer.distributed import environment
from littrainer.distributed.agreement import connect_hosts
from littrainer.distributed.failure_report import keep_last_words
from littrainer.distributed.rendezvous import meet

if TYPE_CHECKING:
    from littrainer.arguments.process import ProcessFacts

GLOO, NCCL, MPI = "gloo", "nccl", "mpi"
# Both at once: what lies on the host is exchanged over gloo, and no GPU is waited for.
NCCL_AND_GLOO = "cpu:gloo,cuda:nccl"
SECONDS_FOR_GLOO_TO_FINISH = 0.1
# The default group whose processes leave word of the error that ends them.
_group_with_words: Any = None


def ensure_process_group(args: ProcessFacts) -> None:
    """Bring the default process group up, unless it is, or there is one process and nobody has launched it.

    All processes have to come here; each waits for the others, at most `ddp_timeout` seconds. A group that somebody
    else has brought up is left alone. On GPUs, tensors on the host can be exchanged too, over gloo.

    Parameters:
        args: training arguments; their device, `ddp_backend` and `ddp_timeout` count.

    Raises:
        ValueError: ranks, backend or port that cannot be.
        RuntimeError: the processes do not find each other; the message says which is missing, and where it was looked
            for.
    """
    if is_up():
        _check_size(args)
        _keep_last_words()
        return
    environment.check_ranks()
    if args.world_size == 1 and not (environment.is_launched() and environment.meeting_point()):
        return
    if not dist.is_available():
        raise RuntimeError(
            f"{args.world_size} processes cannot work together: this build of torch has no torch.distributed. Install "
            "one that has, or start the script as one process."
        )
    device = args.device
    backend = backend_for(device.type, args.ddp_backend)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == MPI:
        # MPI knows its processes itself.
        dist.init_process_group(MPI, timeout=args.ddp_timeout_delta)
    else:
        # One process alone needs no port, which another training may have.
        store: Any = dist.HashStore()
        if args.world_size > 1:
            store = meet(args.process_index, args.world_size, args.ddp_timeout_delta)
        if NCCL in backend:
            claim_gpu(store, args.process_index, str(torch.cuda.get_device_properties(device).uuid))
        dist.init_process_group(
            backend,
            store=store,
            rank=args.process_index,
            world_size=args.world_size,
            timeout=args.ddp_timeout_delta,
        )
        if args.world_size > 1:
            _keep_last_words(store)
            # All are here. Later one of them may have failed, and the others would wait until the timeout.
            connect_hosts()
    atexit.register(_end_group, os.getpid())


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
    if not _is_in_torch(backend):
        given = f'ddp_backend="{backend}"' if wanted else f'"{backend}", which {device_type} needs,'
        have = [name for name in (GLOO, NCCL, MPI) if _is_in_torch(name)]
        raise ValueError(
            f"{given} is not in this build of torch (it has {', '.join(have) or 'none'}). Install a build that has it, "
            "or set ddp_backend to another one."
        )
    return NCCL_AND_GLOO if backend == NCCL and _is_in_torch(GLOO) else backend


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


def _is_in_torch(backend: str) -> bool:
    return dist.is_backend_available(backend)


def _check_size(args: ProcessFacts) -> None:
    size = dist.get_world_size()
    if size != args.world_size and size > 1:
        raise RuntimeError(
            f"The process group that is up has {size} processes, and {environment.WORLD_SIZE}="
            f"{os.environ.get(environment.WORLD_SIZE, '')} in the environment says {args.world_size}. Start the script "
            "with `littrainer run --devices` or torchrun, or set RANK, WORLD_SIZE and LOCAL_RANK before "
            "TrainingArguments are made."
        )


def _keep_last_words(store: Any = None) -> None:
    """Keep the last words in the group that is up, unless they are.

    Parameters:
        store: the one that all processes share; None takes that of a group which somebody else has brought up.
    """
    global _group_with_words
    if _group_with_words is dist.group.WORLD or dist.get_world_size() == 1 or MPI in dist.get_backend():
        return
    if store is None:
        # Not all versions of torch have a public name for it.
        store = dist.PrefixStore("littrainer", dist.distributed_c10d._get_default_store())
    keep_last_words(store, dist.get_rank(), dist.get_world_size())
    _group_with_words = dist.group.WORLD


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
