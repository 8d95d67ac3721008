"""Collectives of all processes, in torch's words: objects and numbers between hosts, nested tensors, flags.

Objects and numbers are exchanged over gloo, so that no GPU is waited for, and all processes call these functions at the
same places. With one process, or without a process group, each function returns its own value.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from littrainer.distributed.failures import (
    FailedElsewhere,
    LostProcess,
    ProcessAddress,
    describe_connection_loss,
    is_consequence,
    register_peers,
)
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.runtime.nested_values import SampleList, concat_nested, is_sample_list, map_nested
from littrainer.runtime.tracebacks import error_and_reasons

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

# Kinds of exchanges: a number, an object, the end of a block, a failure.
_NUMBER, _OBJECT, _DONE, _FAILED = range(4)
# After which a process that works while others wait sends a sign of life.
KEEPALIVE_INTERVAL_S = 10.0
# Attribute of errors that the other processes have received.
PUBLISHED = "_littrainer_told_to_other_processes"


class _HostGroup(NamedTuple):
    """All processes, connected between hosts.

    Parameters:
        world: the default group that it belongs to.
        group: the gloo group.
        background: another one, for operations that are not waited for at once: in one group, a process's next
            operation could meet one that another process has begun before.
        writing: a third one, for threads that write files; empty until there are any.
    """

    world: Any
    group: Any
    background: Any
    writing: list[Any]


_host_group: _HostGroup | None = None
# Number of calls of `barrier_with_timeout`.
_arrivals = 0
# Names of the blocks that are open, the inner one last.
_open_blocks: list[str] = []


def get_world_size() -> int:
    """Return the number of processes of the group that is up; 1 without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def get_rank() -> int:
    """Return the rank of this process in the group that is up; 0 without a group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def is_distributed() -> bool:
    """Return whether several processes are connected."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def connect_hosts() -> None:
    """Connect the hosts, as the first exchange does by itself."""
    if is_distributed():
        _connected()


def get_writing_group() -> Any:
    """Return the group for threads that write files while training continues; all call this together."""
    connected = _connected()
    if not connected.writing:
        connected.writing.append(_new_host_group(connected.world))
    return connected.writing[0]


# ---- Numbers and objects ---------------------------------------------------------------------------------------------


def all_reduce_max(number: int) -> int:
    """Return the largest of the numbers of the processes."""
    return max(_exchanged(_NUMBER, number)) if is_distributed() else number


def any_rank(flag: bool) -> bool:
    """Return whether the flag of any process is true."""
    return bool(all_reduce_max(int(flag)))


def all_gather_object(value: Value) -> list[Value]:
    """Return the values of the processes, by rank; they are pickled."""
    return _exchanged(_OBJECT, value) if is_distributed() else [value]


def broadcast_object(value: Value) -> Value:
    """Return the value of the first process; it is pickled."""
    return all_gather_object(value if get_rank() == 0 else None)[0]  # type: ignore[return-value]


def scatter_object(values: list[Value] | None) -> Value:
    """Return the value that the first process has for this one; it is pickled."""
    if not is_distributed():
        assert values is not None
        return values[0]
    _exchanged(_OBJECT, None)
    own: list[Any] = [None]
    with _naming_lost_processes() as connected:
        dist.scatter_object_list(own, values, src=0, group=connected.group)
    return own[0]


def barrier() -> None:
    """Return when all processes have called this."""
    all_reduce_max(0)


def barrier_with_timeout(seconds: float) -> bool:
    """Return whether all processes have called this within so many seconds; with 0 none waits.

    All call this equally often.
    """
    if not is_distributed():
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


def run_with_keepalive(work: Callable[[], object]) -> None:
    """Run what may take longer in some processes than the others would wait at one place; all call this together."""
    if not is_distributed():
        work()
        return
    pool = ThreadPoolExecutor(1)
    finished = pool.submit(work)
    pool.shutdown(wait=False)
    seconds = min(KEEPALIVE_INTERVAL_S, (_timeout_of(dist.group.WORLD) or dist.default_pg_timeout).total_seconds() / 4)
    while any_rank(bool(wait([finished], seconds).not_done)):
        pass
    finished.result()


@contextmanager
def raise_on_all_ranks(doing: str) -> Iterator[None]:
    """Wait at the end of the block for all processes, and raise in all of them if one has failed.

    Exchanges within the block raise too, once a process has failed. The processes must not wait for each other in
    another way after something that can fail.

    Parameters:
        doing: what is done, for the error: "writing checkpoint-5".

    Raises:
        FailedElsewhere: another process has failed; if this one has, its own error is raised.
        LostProcess: another process has ended.
    """
    if not is_distributed():
        yield
        return
    _open_blocks.append(doing)
    try:
        yield
        _exchanged(_DONE, None)
    except BaseException as error:
        # The others may have received it already, and it was wrapped since. They detect a lost process themselves.
        is_published = any(getattr(link, PUBLISHED, False) for link in error_and_reasons(error))
        if not is_published and not is_consequence(error):
            publishing = threading.Thread(target=_publish, args=(f"{type(error).__name__}: {error}",), daemon=True)
            publishing.start()
            # Ctrl-C is raised here too, and does not wait for what the others still do.
            publishing.join(None if isinstance(error, Exception) else KEEPALIVE_INTERVAL_S)
            with suppress(AttributeError):
                setattr(error, PUBLISHED, True)
        raise
    finally:
        _open_blocks.pop()


def _publish(error: str) -> None:
    # A lost process must not replace this process's error.
    with suppress(LostProcess):
        _exchanged(_FAILED, error)


def _exchanged(kind: int, value: Any) -> list[Any]:
    """Return the values of the processes, all of which have to call this with the same kind."""
    with _naming_lost_processes() as connected:
        received: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(received, (kind, value), group=connected.group)
    errors = {rank: error for rank, (other, error) in enumerate(received) if other == _FAILED}
    if errors and kind != _FAILED:
        named = "; ".join(f"process {rank} with {error}" for rank, error in errors.items())
        doing = _open_blocks[-1] if _open_blocks else "what all do together"
        raise FailedElsewhere(f"Process {dist.get_rank()} ends because {doing} failed in {named}")
    if not errors and len({other for other, _ in received}) > 1:
        raise LostProcess(
            f"Process {dist.get_rank()} and others are at different places of the program, so that they cannot agree. "
            "Code that runs in some of the processes only must not save, evaluate or end the training."
        )
    return [value for _, value in received]


@contextmanager
def _naming_lost_processes() -> Iterator[_HostGroup]:
    try:
        yield _connected()
    except RuntimeError as error:
        raise LostProcess(
            f"Process {dist.get_rank()} of {dist.get_world_size()} can no longer agree with the others: "
            f"{describe_connection_loss(error)}"
        ) from error


def _connected() -> _HostGroup:
    global _host_group
    world = dist.group.WORLD
    if _host_group is None or _host_group.world is not world:
        group, background = (_new_host_group(world) for _ in range(2))
        peers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peers, ProcessAddress(socket.gethostname(), os.getpid()), group=group)
        register_peers(peers)
        _host_group = _HostGroup(world, group, background, [])
    return _host_group


def _new_host_group(world: Any) -> Any:
    return dist.new_group(backend="gloo", timeout=_timeout_of(world))


def _timeout_of(world: Any) -> timedelta | None:
    # Only the options of the group's backend have the timeout that it was made with; None takes torch's own.
    for device in ("cpu", "cuda"):
        try:
            return world._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return None


def describe_last_collective() -> str | None:
    """Return the last collective operation of this process, for a report; None if it is not known."""
    # torch has no public name for its flight recorder.
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None)
    entries = json.loads(dump(True, False)).get("entries", []) if dump is not None and is_distributed() else []
    if not entries:
        return None
    last = max(entries, key=lambda entry: entry["time_created_ns"])
    group, *_ = last["process_group"]
    number = f"number {last['collective_seq_id']} of group {group}"
    block = f", {_open_blocks[-1]}" if _open_blocks else ""
    return f"{last['profiling_name']} of {last['input_sizes']}, {number}{block}"


# ---- Nested tensors --------------------------------------------------------------------------------------------------


def gather_across_processes(value: Any, copies: int = 1) -> Any:
    """Return nested tensors of all processes, joined along their rows; a single number gives a row for each process.

    Parameters:
        copies: so many neighbouring processes hold the same values, which count once.
    """
    gather = partial(_gathered_tensor, copies=copies)
    return value if get_world_size() == 1 else map_nested(gather, value, is_sample_list)


def gather_objects_across_processes(value: Any, copies: int = 1) -> Any:
    """Return nested objects of all processes, pickled on their way.

    Parameters:
        copies: as for `gathered`.

    Lists are taken for one entry per sample and put one after the other, tensors are joined along their rows (and
    padded with -100 if they are not equally long), and what tuples and mappings hold is put together one by one.
    Anything else becomes a list with one entry for each process.
    """
    if get_world_size() == 1:
        return value
    pieces: list[Any] = [None] * get_world_size()
    on_host = map_nested(lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, value)
    dist.all_gather_object(pieces, on_host)
    return _joined_objects(pieces[::copies])


def pad_across_processes(value: Any, dim: int = 0, fill: int = 0, at_start: bool = False) -> Any:
    """Return nested tensors, each as long in one dimension as it is in the process where it is longest.

    Parameters:
        dim: the dimension; a tensor that does not have it is left as it is.
        fill: what is put into the new places.
        at_start: put them before what is there.
    """

    def pad(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or not -tensor.dim() <= dim < tensor.dim():
            return tensor
        length = tensor.shape[dim]
        longest = torch.tensor(length, device=tensor.device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        missing = int(longest) - length
        if missing == 0:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = missing
        filling = tensor.new_full(shape, fill)
        return torch.cat([filling, tensor] if at_start else [tensor, filling], dim=dim)

    return value if get_world_size() == 1 else map_nested(pad, value, is_sample_list)


def get_full_tensor(value: Any) -> Any:
    """Return a tensor that is spread over processes as a whole, on the group's device; anything else as it is."""
    if not is_a(value, "sharded tensor"):
        return value
    device = value.device_mesh.device_type
    # Offloaded parts lie on the host, where the processes may have nothing to talk through.
    return (value if value.device.type == device else value.to(device)).full_tensor()


def reduce_across_processes(value: Any, reduction: str = "sum") -> Any:
    """Return copies of nested tensors, put together over all processes.

    Parameters:
        reduction: `mean` or `max`; anything else sums.
    """

    def reduce(tensor: Any) -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"Only tensors can be reduced, not {type(tensor).__name__}; make it a tensor first.")
        total = tensor.clone()
        if get_world_size() > 1:
            dist.all_reduce(total, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM)
            if reduction == "mean":
                total /= get_world_size()
        return total

    return map_nested(reduce, value)


def sum_across_processes(number: float, device: torch.device, copies: int = 1) -> float:
    """Return the sum of the processes' numbers; of several in single precision, as in transformers."""
    if get_world_size() == 1:
        return number
    return gather_across_processes(torch.tensor([number], device=device), copies).sum().item()


def has_only_tensors(value: Any) -> bool:
    """Return whether each leaf of a nested value is a tensor."""
    if isinstance(value, Mapping):
        return all(map(has_only_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(has_only_tensors, value))
    return isinstance(value, torch.Tensor)


def _gathered_tensor(tensor: Any, copies: int = 1) -> Any:
    if isinstance(tensor, SampleList):
        return gather_objects_across_processes(tensor, copies)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"Only tensors can be gathered, not {type(tensor).__name__}; set eval_use_gather_object=True.")
    tensor = torch.atleast_1d(tensor).contiguous()
    # Processes may have different numbers of rows, and a collective of tensors needs equal shapes.
    rows = torch.tensor(tensor.shape[0], device=tensor.device)
    rows_of_each = [torch.empty_like(rows) for _ in range(get_world_size())]
    dist.all_gather(rows_of_each, rows)
    numbers = [int(number) for number in rows_of_each]
    most = max(numbers)
    if tensor.shape[0] < most:
        tensor = torch.cat([tensor, tensor.new_zeros(most - tensor.shape[0], *tensor.shape[1:])])
    pieces = [torch.empty_like(tensor) for _ in numbers]
    dist.all_gather(pieces, tensor)
    return torch.cat([piece[:number] for piece, number in zip(pieces[::copies], numbers[::copies], strict=True)])


def _joined_objects(pieces: list[Any]) -> Any:
    first = pieces[0]
    if isinstance(first, list):
        return type(first)(entry for piece in pieces for entry in piece)
    if isinstance(first, Mapping):
        return type(first)({name: _joined_objects([piece[name] for piece in pieces]) for name in first})  # type: ignore[call-arg]
    if isinstance(first, tuple):
        entries = [_joined_objects(list(column)) for column in zip(*pieces, strict=True)]
        return type(first)(*entries) if hasattr(first, "_fields") else tuple(entries)
    return concat_nested(pieces) if isinstance(first, torch.Tensor) else pieces


# ---- Flags -----------------------------------------------------------------------------------------------------------


class SynchronizedFlags:
    """Flags of an object, such as one to stop, that are equal in all processes; all call it at the same places.

    A process that raises a flag waits for the others. A process that raises none continues, and reads at its next call
    what the others have raised, so that no process waits at a step at which nothing is asked for.

    Parameters:
        names: the attributes that are flags.
        processes: number of processes.
    """

    def __init__(self, names: Sequence[str], processes: int):
        self.names = tuple(names)
        self.processes = processes
        # Counts of the last call, and the operation that sums them over the processes.
        self._last_call: tuple[torch.Tensor, Any] | None = None
        # Flags that only some processes have raised, and that all raise at the next call.
        self._late: set[str] = set()
        # Flags that this process decides on for all.
        self.decided_here: set[str] = set()
        self._warned: set[str] = set()
        self._were_ready = False

    def sync(self, holder: Any, among: Sequence[str] | None = None, is_ready: bool = False) -> bool:
        """Leave flags raised that all processes raise. A flag that only some raise is lowered; all raise it next time.

        Parameters:
            holder: the object that has the flags.
            among: the flags that count at this place; the others are left alone.
            is_ready: whether this process is ready for something that all must do at once.

        Returns:
            whether all processes were ready at the last call.
        """
        counted = self.names if among is None else among
        self.finish()
        were_ready = self._were_ready
        for name in self._late.intersection(counted):
            self._late.discard(name)
            setattr(holder, name, True)
        raised = [name in counted and bool(getattr(holder, name)) for name in self.names]
        counts, work = torch.tensor([*raised, is_ready], dtype=torch.int64), None
        if is_distributed():
            with _naming_lost_processes() as connected:
                work = dist.all_reduce(counts, group=connected.background, async_op=True)
        self._last_call = counts, work
        if any(raised):
            self.finish()
            for name in self._late.intersection(counted):
                if getattr(holder, name):
                    setattr(holder, name, False)
                    if name not in self.decided_here:
                        self._warn(name)
        return were_ready

    def finish(self) -> None:
        """Wait until all processes have made their last call."""
        if self._last_call is None:
            return
        (counts, work), self._last_call = self._last_call, None
        if work is not None:
            with _naming_lost_processes():
                work.wait()
        *raised, ready = counts.tolist()
        self._were_ready = ready == self.processes
        self._late.update(name for name, count in zip(self.names, raised, strict=True) if 0 < count < self.processes)

    def _warn(self, name: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "control.%s was set in this process and not in all of them. All do what it asks for one step later; a "
                "callback that decides by time, or by values of one process, should let that process decide for all.",
                name,
            )
