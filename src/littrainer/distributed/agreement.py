"""What processes agree on: a flag that one of them has raised, a value, an error that ends all of them.

They agree between hosts, over gloo, so that no GPU is waited for. All processes have to come here at the same places.
With one process, or without a process group, nothing is done.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from littrainer.distributed.failure_report import (
    FailedElsewhere,
    LostProcess,
    ProcessPlace,
    causes_of,
    is_consequence,
    know_processes,
    why_lost,
)

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

# What processes come to: agree on a number, hand out an object, end a block, or say that they have failed.
_NUMBER, _OBJECT, _DONE, _FAILED = range(4)
# After which a process that works while others wait shows them that it is there.
LONGEST_SILENCE_SECONDS = 10.0
# Set on errors that the other processes know of.
TOLD = "_littrainer_told_to_other_processes"


class _HostGroup(NamedTuple):
    """All processes, connected between hosts.

    Parameters:
        world: the default group that it belongs to.
        group: the gloo group.
        background: another one, for what is not waited for at once: in one group, what one process does next could
            meet what another has begun before.
        writing: a third one, for threads that write files; empty until there are any.
    """

    world: Any
    group: Any
    background: Any
    writing: list[Any]


_host_group: _HostGroup | None = None
# How often this process has called `all_arrive`.
_arrivals = 0
# What the blocks do that are open, the inner one last.
_doing: list[str] = []


def are_several() -> bool:
    """Return whether several processes are connected."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def connect_hosts() -> None:
    """Connect the hosts, as the first agreement does by itself."""
    if are_several():
        _connected()


def group_for_writing() -> Any:
    """Return the group in which threads that write files agree while training goes on; all call this together."""
    connected = _connected()
    if not connected.writing:
        connected.writing.append(_new_host_group(connected.world))
    return connected.writing[0]


def largest(number: int) -> int:
    """Return the largest of the numbers that the processes call this with."""
    return max(_exchanged(_NUMBER, number)) if are_several() else number


def agreed(flag: bool) -> bool:
    """Return whether any process calls this with true."""
    return bool(largest(int(flag)))


def begin_counting(flags: Sequence[bool]) -> Callable[[], list[int]]:
    """Begin to count, for each flag, the processes that call this with it raised.

    Returns:
        what waits for the others and returns the counts.
    """
    counts = torch.tensor([int(flag) for flag in flags])
    if not are_several():
        return counts.tolist
    with _naming_lost_processes() as connected:
        work: Any = dist.all_reduce(counts, group=connected.background, async_op=True)

    def wait() -> list[int]:
        with _naming_lost_processes():
            work.wait()
        return counts.tolist()

    return wait


def all_arrive(seconds: float) -> bool:
    """Note that this process has come here, and return whether all have within so many seconds.

    All call this equally often; with 0 seconds a process waits for nobody.
    """
    if not are_several():
        return True
    global _arrivals
    _arrivals += 1
    # torch has no public name for the store that all processes share. A collective operation could not be given up.
    store = dist.PrefixStore(f"littrainer/arrivals/{_arrivals}", dist.distributed_c10d._get_default_store())
    deadline = time.monotonic() + seconds
    with suppress(RuntimeError):
        count = store.add("count", 1)
        while count < dist.get_world_size() and time.monotonic() < deadline:
            time.sleep(0.02)
            count = store.add("count", 0)
        return count == dist.get_world_size()
    return False


def wait_for_each_other() -> None:
    """Return when all processes have come here."""
    largest(0)


def while_others_wait(work: Callable[[], object]) -> None:
    """Do what takes long in some processes, with the others waiting; all call this together.

    They agree again and again that they are there, since it may take longer than they would wait at one place.
    """
    if not are_several():
        work()
        return
    pool = ThreadPoolExecutor(1)
    finished = pool.submit(work)
    pool.shutdown(wait=False)
    seconds = min(LONGEST_SILENCE_SECONDS, longest_wait().total_seconds() / 4)
    while agreed(bool(wait([finished], seconds).not_done)):
        pass
    finished.result()


def from_each(value: Value) -> list[Value]:
    """Return the values that the processes call this with, by rank; pickled on their way."""
    return _exchanged(_OBJECT, value) if are_several() else [value]


def from_first(value: Value) -> Value:
    """Return the value that the first process calls this with; pickled on its way."""
    return from_each(value if not are_several() or dist.get_rank() == 0 else None)[0]  # type: ignore[return-value]


def from_first_to_each(values: list[Value] | None) -> Value:
    """Return what the first process has for this one; pickled on its way."""
    if not are_several():
        assert values is not None
        return values[0]
    _exchanged(_OBJECT, None)
    own: list[Any] = [None]
    with _naming_lost_processes() as connected:
        dist.scatter_object_list(own, values, src=0, group=connected.group)
    return own[0]


@contextmanager
def failing_together(doing: str) -> Iterator[None]:
    """Wait at the end of the block for all processes, and fail in all of them if one has failed.

    Within the block processes may agree on something else, and then hear there of one that has failed. They must not
    wait for each other in another way after something that can fail.

    Parameters:
        doing: what is done, for the error: "writing checkpoint-5".

    Raises:
        FailedElsewhere: another process has failed; if this one has, its own error is raised.
        LostProcess: another process has ended.
    """
    if not are_several():
        yield
        return
    _doing.append(doing)
    try:
        yield
        _exchanged(_DONE, None)
    except BaseException as error:
        # The others may know it already, and it was wrapped since. Of a lost process they find out themselves.
        if not is_consequence(error) and not any(getattr(one, TOLD, False) for one in causes_of(error)):
            _exchanged(_FAILED, f"{type(error).__name__}: {error}")
            with suppress(AttributeError):
                setattr(error, TOLD, True)
        raise
    finally:
        _doing.pop()


def _exchanged(kind: int, value: Any) -> list[Any]:
    """Return the values that the processes come with, all to the same kind of agreement; pickled on their way.

    Raises:
        FailedElsewhere: another process has come to say that it has failed.
        LostProcess: another process is at another place of the program, or has ended.
    """
    with _naming_lost_processes() as connected:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (kind, value), group=connected.group)
    errors = {rank: error for rank, (other, error) in enumerate(found) if other == _FAILED}
    if errors and kind != _FAILED:
        named = "; ".join(f"process {rank} with {error}" for rank, error in errors.items())
        doing = _doing[-1] if _doing else "what all do together"
        raise FailedElsewhere(f"Process {dist.get_rank()} ends because {doing} failed in {named}")
    if not errors and len({other for other, _ in found}) > 1:
        raise LostProcess(
            f"Process {dist.get_rank()} and others are at different places of the program, so that they cannot agree. "
            "Code that runs in some of the processes only must not save, evaluate or end the training."
        )
    return [value for _, value in found]


@contextmanager
def _naming_lost_processes() -> Iterator[_HostGroup]:
    try:
        yield _connected()
    except RuntimeError as error:
        raise LostProcess(
            f"Process {dist.get_rank()} of {dist.get_world_size()} can no longer agree with the others: "
            f"{why_lost(error)}"
        ) from error


def _connected() -> _HostGroup:
    global _host_group
    world = dist.group.WORLD
    if _host_group is None or _host_group.world is not world:
        group, background = (_new_host_group(world) for _ in range(2))
        places: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(places, ProcessPlace(socket.gethostname(), os.getpid()), group=group)
        know_processes(places)
        _host_group = _HostGroup(world, group, background, [])
    return _host_group


def _new_host_group(world: Any) -> Any:
    return dist.new_group(backend="gloo", timeout=_timeout_of(world))


def last_collective() -> str | None:
    """Return what this process did last together with others, for a report; None if that is not known."""
    # torch has no public name for its flight recorder.
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None)
    if dump is None or not are_several():
        return None
    entries = json.loads(dump(True, False)).get("entries", [])
    if not entries:
        return None
    last = max(entries, key=lambda entry: entry["time_created_ns"])
    group, *_ = last["process_group"]
    number = f"number {last['collective_seq_id']} of group {group}"
    return f"{last['profiling_name']} of {last['input_sizes']}, {number}{f', {_doing[-1]}' if _doing else ''}"


def longest_wait() -> timedelta:
    """Return how long the processes wait for each other, as their group was made."""
    return _timeout_of(dist.group.WORLD) or dist.default_pg_timeout


def _timeout_of(world: Any) -> Any:
    # Only the options of the group's backend know what it was made with; None takes torch's own.
    for device in ("cpu", "cuda"):
        try:
            return world._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return None


# ---- Flags -----------------------------------------------------------------------------------------------------------


class FlagsRaisedTogether:
    """Keeps flags of an object equal in all processes, such as one to stop; all call it at the same places.

    A process that raises a flag waits for the others; one that raises none goes on, and looks at the next step what
    they did. So nobody waits at a step at which nothing is asked for.

    Parameters:
        names: the attributes that are flags.
        processes: number of processes.
    """

    def __init__(self, names: Sequence[str], processes: int):
        self.names = tuple(names)
        self.processes = processes
        # What was begun at the last call and nobody has asked for yet.
        self._counting: Callable[[], list[int]] | None = None
        # Flags that some raised, and all raise at the next call.
        self._late: set[str] = set()
        # Flags that this process is there to decide on for all, and those that a warning has named.
        self.decided_here: set[str] = set()
        self._told: set[str] = set()
        # Processes that were ready at the last call that was looked at.
        self._ready = 0

    def settle(self, holder: Any, among: Sequence[str] | None = None, is_ready: bool = False) -> bool:
        """Leave flags raised that all processes raise. One that only some raise is lowered; all raise it next time.

        Parameters:
            holder: the object that has the flags.
            among: the flags that count at this place; the others are left alone.
            is_ready: whether this process is ready for something that all are to do at once.

        Returns:
            whether all processes were ready at the last call.
        """
        counted = self.names if among is None else among
        self._look_at_last_call()
        were_ready = self._ready == self.processes
        for name in [name for name in counted if name in self._late]:
            self._late.discard(name)
            setattr(holder, name, True)
        raised = [name in counted and bool(getattr(holder, name)) for name in self.names]
        self._counting = begin_counting([*raised, is_ready])
        if any(raised):
            self._look_at_last_call()
            for name in self._late.intersection(counted):
                if getattr(holder, name):
                    setattr(holder, name, False)
                    if name not in self.decided_here:
                        self._tell(name)
        return were_ready

    def finish(self) -> None:
        """Wait until all processes have made their last call; what some have raised then comes to nothing."""
        self._look_at_last_call()

    def _look_at_last_call(self) -> None:
        if self._counting is None:
            return
        (*counts, self._ready), self._counting = self._counting(), None
        self._late.update(name for name, count in zip(self.names, counts, strict=True) if 0 < count < self.processes)

    def _tell(self, name: str) -> None:
        if name not in self._told:
            self._told.add(name)
            logger.warning(
                "control.%s was set in this process and not in all of them. All do what it asks for one step later; a "
                "callback that decides by time, or by values of one process, should let that process decide for all.",
                name,
            )
