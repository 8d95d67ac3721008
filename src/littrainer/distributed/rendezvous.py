"""How processes find each other: all come to one store, and who does not come is named."""

from __future__ import annotations

import itertools
import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from littrainer.distributed import environment
from littrainer.distributed.environment import MeetingPoint

# torchrun's agent holds the store, and no process of its own has to.
AGENT_HOLDS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
ARRIVALS, COMPLETE = "arrivals", "complete"
# Numbers the meetings of this process.
_meetings = itertools.count()


class MeetingError(RuntimeError):
    """The processes have not found each other."""


class _TwoOfOneRank(MeetingError):
    """Another process has come under the same rank."""


def meet(rank: int, world_size: int, timeout: timedelta) -> Any:
    """Wait until all processes are there, and return the store that they share.

    Parameters:
        timeout: after which the waiting ends.

    Raises:
        MeetingError: nobody says where to meet; the port is taken; the first process, or another, does not come.
    """
    point = environment.meeting_point()
    if point is None:
        raise MeetingError(
            f"{world_size} processes ({environment.WORLD_SIZE}) are to work together, and {environment.MAIN_ADDRESS}, "
            "which says where the first of them is found, is not set. Start the script with `littrainer run --devices` "
            f"or torchrun, or set {environment.MAIN_ADDRESS} and {environment.MAIN_PORT} in each process."
        )
    # A script may end its process group and begin another one.
    meeting = f"littrainer/{os.environ.get(RESTARTS, '0')}/{next(_meetings)}"
    store = dist.PrefixStore(meeting, _open_store(point, rank, world_size, timeout))
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
        raise MeetingError(_why_no_store(point, rank, world_size, timeout, is_host, error)) from error


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
        return (
            f"Process 0 cannot open port {point.port} at {point.address} ({environment.MAIN_ADDRESS}), where the "
            f"{world_size} processes are to meet: {_first_line(error)}"
        )
    return (
        f"Process {rank} of {world_size} has not found the first process at {point} ({environment.MAIN_ADDRESS}, "
        f"{environment.MAIN_PORT}) within {timeout.total_seconds():g} s (ddp_timeout). Is process 0 running, is that "
        "its address, and does a firewall leave the port open?"
    )


def _wait_for_all(store: Any, point: MeetingPoint, rank: int, world_size: int, timeout: timedelta) -> None:
    try:
        own = f"process {os.getpid()} on {socket.gethostname()}"
        earlier = store.compare_set(_arrival_of(rank), "", own).decode()
        if earlier != own:
            raise _TwoOfOneRank(
                f"{environment.RANK}={rank} is given to two processes, {earlier} and {own}. Each process that makes "
                "TrainingArguments needs a rank of its own; one that a process starts must not inherit its rank."
            )
        if store.add(ARRIVALS, 1) >= world_size:
            store.set(COMPLETE, "")
        store.wait([COMPLETE], timeout)
    except _TwoOfOneRank:
        raise
    except RuntimeError as error:
        raise MeetingError(_who_is_missing(store, point, rank, world_size, timeout)) from error


def _who_is_missing(store: Any, point: MeetingPoint, rank: int, world_size: int, timeout: timedelta) -> str:
    try:
        missing = [str(other) for other in range(world_size) if not store.check([_arrival_of(other)])]
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


def _arrival_of(rank: int) -> str:
    return f"arrival/{rank}"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
