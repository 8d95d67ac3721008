"""What processes agree on: a flag that one of them has raised, a value, an error that ends all of them.

They agree between hosts, over gloo, so that no GPU is waited for. All processes have to come here at the same places.
With one process, or without a process group, nothing is done.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")

# How long the system may take to say of a process that it has ended, after its connections have.
SECONDS_UNTIL_AN_END_IS_SEEN = 1.0


class FailedElsewhere(RuntimeError):
    """Another process has failed at what all do together; its rank and its error are in the message."""


class LostProcess(RuntimeError):
    """Another process can no longer be reached: it has ended, or it hangs."""


class _Process(NamedTuple):
    host: str
    number: int


class _HostGroup(NamedTuple):
    """All processes, connected between hosts.

    Parameters:
        world: the default group that it belongs to.
        group: the gloo group.
        processes: who they are, by rank.
    """

    world: Any
    group: Any
    processes: list[_Process]


_host_group: _HostGroup | None = None


def are_several() -> bool:
    """Whether several processes are connected."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def connect_hosts() -> None:
    """Connect the hosts, as the first agreement does by itself."""
    if are_several():
        _connected()


def largest(number: int) -> int:
    """The largest of the numbers that the processes call this with."""
    if not are_several():
        return number
    shared = torch.tensor(number)
    connected = _connected()
    with _naming_lost_processes(connected):
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=connected.group)
    return int(shared.item())


def agreed(flag: bool) -> bool:
    """Whether any process calls this with true."""
    return bool(largest(int(flag)))


def wait_for_each_other() -> None:
    """Return when all processes have come here."""
    largest(0)


def from_each(value: Value) -> list[Value]:
    """The values that the processes call this with, by rank; pickled on their way."""
    if not are_several():
        return [value]
    connected = _connected()
    values: list[Any] = [None] * len(connected.processes)
    with _naming_lost_processes(connected):
        dist.all_gather_object(values, value, group=connected.group)
    return values


def from_first(value: Value) -> Value:
    """The value that the first process calls this with; pickled on its way."""
    if not are_several():
        return value
    connected = _connected()
    box = [value]
    with _naming_lost_processes(connected):
        dist.broadcast_object_list(box, src=0, group=connected.group, device=torch.device("cpu"))
    return box[0]


@contextmanager
def failing_together(doing: str) -> Iterator[None]:
    """A block at whose end all processes wait for each other, and which fails in all of them if it fails in one.

    The block must not wait for the others where some of them may have failed before.

    Parameters:
        doing: what is done, for the error: "writing checkpoint-5".

    Raises:
        FailedElsewhere: another process has failed; where this one has, its own error is raised.
        LostProcess: another process has ended.
    """
    if not are_several():
        yield
        return
    own: BaseException | None = None
    try:
        yield
    except LostProcess:
        # Nothing can be agreed on any more; the others find out as this process did.
        raise
    except BaseException as error:
        own = error
    if agreed(own is not None):
        errors = from_each(None if own is None else f"{type(own).__name__}: {own}")
        if own is not None:
            raise own
        failed = {rank: error for rank, error in enumerate(errors) if error is not None}
        named = "; ".join(f"process {rank} with {error}" for rank, error in failed.items())
        raise FailedElsewhere(f"This process ({dist.get_rank()}) ends because {doing} failed in {named}")


def _connected() -> _HostGroup:
    global _host_group
    world = dist.group.WORLD
    if _host_group is None or _host_group.world is not world:
        group = dist.new_group(backend="gloo", timeout=_timeout_of(world))
        processes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(processes, _Process(socket.gethostname(), os.getpid()), group=group)
        _host_group = _HostGroup(world, group, processes)
    return _host_group


def _timeout_of(world: Any) -> Any:
    # Only the options of the group's backend know what it was made with; None takes torch's own.
    for device in ("cpu", "cuda"):
        try:
            return world._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return None


@contextmanager
def _naming_lost_processes(connected: _HostGroup) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        ended = _ended(connected.processes)
        who = f"process {', '.join(map(str, ended))} has ended" if ended else "one of them has ended, or hangs"
        raise LostProcess(
            f"Process {dist.get_rank()} of {len(connected.processes)} can no longer agree with the others: {who}. What "
            "that process wrote last says why."
        ) from error


def _ended(processes: list[_Process]) -> list[int]:
    """Ranks of the processes on this host that have ended."""
    here = [(rank, process.number) for rank, process in enumerate(processes) if process.host == socket.gethostname()]
    deadline = time.monotonic() + SECONDS_UNTIL_AN_END_IS_SEEN
    while True:
        ended = [rank for rank, number in here if not _is_running(number)]
        if ended or time.monotonic() > deadline:
            return ended
        time.sleep(0.02)


def _is_running(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    try:
        # A process whose end its parent has not noticed is still there, as a zombie (Z).
        return Path(f"/proc/{number}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return True
