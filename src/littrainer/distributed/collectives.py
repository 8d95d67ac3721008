"""Collectives of all processes, named as in torch: objects and numbers between hosts, nested tensors, flags.

All processes call these functions at the same places. Objects and numbers use gloo, so that no GPU is waited for. With
a single process, or without a process group, each function returns its input.
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
    PeerFailedError,
    PeerLostError,
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

# Tags of exchanges.
_NUMBER, _OBJECT, _DONE, _FAILED = range(4)
KEEPALIVE_INTERVAL_S = 10.0
# Attribute of errors that the other processes have received.
PUBLISHED = "_littrainer_published"


class _HostGroup(NamedTuple):
    """Separate gloo groups of all processes for concurrent operations.

    Parameters:
        world: the default group at their creation.
        writing: for threads that write files; empty until it is needed.
    """

    world: Any
    group: Any
    background: Any
    writing: list[Any]


_host_group: _HostGroup | None = None
_barrier_count = 0
_open_blocks: list[str] = []


def get_world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def get_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def connect_hosts() -> None:
    """Create the gloo groups now, instead of at the first exchange."""
    if is_distributed():
        _connect()


def get_writing_group() -> Any:
    """Return the group for threads that write files; a collective call."""
    groups = _connect()
    if not groups.writing:
        groups.writing.append(_new_host_group(groups.world))
    return groups.writing[0]


# ---- Numbers and objects ---------------------------------------------------------------------------------------------


def all_reduce_max(number: int) -> int:
    return max(_exchange(_NUMBER, number)) if is_distributed() else number


def any_rank(flag: bool) -> bool:
    return bool(all_reduce_max(int(flag)))


def all_gather_object(value: Value) -> list[Value]:
    return _exchange(_OBJECT, value) if is_distributed() else [value]


def broadcast_object(value: Value) -> Value:
    return all_gather_object(value if get_rank() == 0 else None)[0]  # type: ignore[return-value]


def scatter_object(values: list[Value] | None) -> Value:
    """Return this rank's entry of the first process's list, pickled."""
    if not is_distributed():
        assert values is not None
        return values[0]
    _exchange(_OBJECT, None)
    output: list[Any] = [None]
    with _name_lost_processes() as groups:
        dist.scatter_object_list(output, values, src=0, group=groups.group)
    return output[0]


def barrier() -> None:
    all_reduce_max(0)


def barrier_with_timeout(seconds: float) -> bool:
    """Return whether all processes reach this barrier within a number of seconds; 0 does not wait.

    All processes call this equally often.
    """
    if not is_distributed():
        return True
    global _barrier_count
    _barrier_count += 1
    # A store can time out without breaking the group; torch has no public name for the shared store.
    store = dist.PrefixStore(f"littrainer/barrier/{_barrier_count}", dist.distributed_c10d._get_default_store())
    deadline = time.monotonic() + seconds
    with suppress(RuntimeError):
        count = store.add("count", 1)
        while count < dist.get_world_size() and time.monotonic() < deadline:
            time.sleep(0.02)
            count = store.add("count", 0)
        return count == dist.get_world_size()
    return False


def run_with_keepalive(work: Callable[[], Value]) -> Value:
    """Run work that may take some processes longer than the group's timeout; a collective call."""
    if not is_distributed():
        return work()
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    timeout = _get_timeout(dist.group.WORLD) or dist.default_pg_timeout
    interval = min(KEEPALIVE_INTERVAL_S, timeout.total_seconds() / 4)
    while any_rank(bool(wait([future], interval).not_done)):
        pass
    return future.result()


@contextmanager
def raise_on_all_ranks(doing: str) -> Iterator[None]:
    """Wait for all processes at the end of the block, and raise in all of them if any process fails.

    Exchanges within the block raise too. Other waits must not follow code that can fail.

    Parameters:
        doing: the activity, for the error: "writing checkpoint-5".

    Raises:
        PeerFailedError: another process failed; an error of this process is raised unchanged.
        PeerLostError: another process has ended.
    """
    if not is_distributed():
        yield
        return
    _open_blocks.append(doing)
    try:
        yield
        _exchange(_DONE, None)
    except BaseException as error:
        # A published error may have been wrapped since. The others detect a lost process themselves.
        is_published = any(getattr(link, PUBLISHED, False) for link in error_and_reasons(error))
        if not is_published and not is_consequence(error):
            thread = threading.Thread(target=_publish, args=(f"{type(error).__name__}: {error}",), daemon=True)
            thread.start()
            # After Ctrl-C, do not wait long for the other processes.
            thread.join(None if isinstance(error, Exception) else KEEPALIVE_INTERVAL_S)
            with suppress(AttributeError):
                setattr(error, PUBLISHED, True)
        raise
    finally:
        _open_blocks.pop()


def _publish(error: str) -> None:
    # PeerLostError must not replace this process's error.
    with suppress(PeerLostError):
        _exchange(_FAILED, error)


def _exchange(kind: int, value: Any) -> list[Any]:
    """Gather the values of all processes, and raise if a process failed or sent another kind."""
    with _name_lost_processes() as groups:
        received: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(received, (kind, value), group=groups.group)
    errors = {rank: error for rank, (kind_of_rank, error) in enumerate(received) if kind_of_rank == _FAILED}
    if errors and kind != _FAILED:
        named = "; ".join(f"process {rank} with {error}" for rank, error in errors.items())
        doing = _open_blocks[-1] if _open_blocks else "what all do together"
        raise PeerFailedError(f"Process {dist.get_rank()} ends because {doing} failed in {named}")
    if not errors and len({kind_of_rank for kind_of_rank, _ in received}) > 1:
        raise PeerLostError(
            f"Process {dist.get_rank()} and others are at different places of the program, so that they cannot agree. "
            "Code that runs in some of the processes only must not save, evaluate or end the training."
        )
    return [value for _, value in received]


@contextmanager
def _name_lost_processes() -> Iterator[_HostGroup]:
    try:
        yield _connect()
    except RuntimeError as error:
        raise PeerLostError(
            f"Process {dist.get_rank()} of {dist.get_world_size()} can no longer agree with the others: "
            f"{describe_connection_loss(error)}"
        ) from error


def _connect() -> _HostGroup:
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
    return dist.new_group(backend="gloo", timeout=_get_timeout(world))


def _get_timeout(world: Any) -> timedelta | None:
    # The group's timeout is in its backend's options only; None is torch's default.
    for device in ("cpu", "cuda"):
        try:
            return world._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return None


def describe_last_collective() -> str | None:
    """Return this process's last collective, from torch's flight recorder (not public)."""
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
    """Return nested tensors of all processes, concatenated along their rows; scalars become rows.

    Parameters:
        copies: number of neighbouring processes with the same values, which count once.
    """
    gather = partial(_all_gather_tensor, copies=copies)
    return value if get_world_size() == 1 else map_nested(gather, value, is_sample_list)


def gather_objects_across_processes(value: Any, copies: int = 1) -> Any:
    """Return nested objects of all processes, pickled.

    Lists are concatenated. Tensors are concatenated along their rows, padded with -100. Tuples and mappings are merged
    entry by entry. Other values become a list with an entry for each process.
    """
    if get_world_size() == 1:
        return value
    pieces: list[Any] = [None] * get_world_size()
    on_host = map_nested(lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, value)
    dist.all_gather_object(pieces, on_host)
    return _join_objects(pieces[::copies])


def pad_across_processes(value: Any, dim: int = 0, fill: int = 0, at_start: bool = False) -> Any:
    """Pad nested tensors to the longest length over the processes.

    Parameters:
        dim: dimension to pad; tensors without it are returned unchanged.
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
        padding = tensor.new_full(shape, fill)
        return torch.cat([padding, tensor] if at_start else [tensor, padding], dim=dim)

    return value if get_world_size() == 1 else map_nested(pad, value, is_sample_list)


def get_full_tensor(value: Any) -> Any:
    """Return the full tensor of a DTensor, on the group's device; other values unchanged."""
    if not is_a(value, "sharded tensor"):
        return value
    device = value.device_mesh.device_type
    # The group may have no backend for offloaded shards on the host.
    return (value if value.device.type == device else value.to(device)).full_tensor()


def reduce_across_processes(value: Any, reduction: str = "sum") -> Any:
    """Return nested tensors, reduced over all processes.

    Parameters:
        reduction: `mean` or `max`; other values sum.
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
    """Sum over the processes; several processes sum in single precision, as in transformers."""
    if get_world_size() == 1:
        return number
    return gather_across_processes(torch.tensor([number], device=device), copies).sum().item()


def has_only_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(has_only_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(has_only_tensors, value))
    return isinstance(value, torch.Tensor)


def _all_gather_tensor(tensor: Any, copies: int = 1) -> Any:
    if isinstance(tensor, SampleList):
        return gather_objects_across_processes(tensor, copies)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"Only tensors can be gathered, not {type(tensor).__name__}; set eval_use_gather_object=True.")
    tensor = torch.atleast_1d(tensor).contiguous()
    # all_gather needs equal shapes.
    row_count = torch.tensor(tensor.shape[0], device=tensor.device)
    gathered_counts = [torch.empty_like(row_count) for _ in range(get_world_size())]
    dist.all_gather(gathered_counts, row_count)
    row_counts = [int(count) for count in gathered_counts]
    missing = max(row_counts) - tensor.shape[0]
    if missing:
        tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
    pieces = [torch.empty_like(tensor) for _ in row_counts]
    dist.all_gather(pieces, tensor)
    return torch.cat([piece[:count] for piece, count in zip(pieces[::copies], row_counts[::copies], strict=True)])


def _join_objects(pieces: list[Any]) -> Any:
    first = pieces[0]
    if isinstance(first, list):
        return type(first)(entry for piece in pieces for entry in piece)
    if isinstance(first, Mapping):
        return type(first)({name: _join_objects([piece[name] for piece in pieces]) for name in first})  # type: ignore[call-arg]
    if isinstance(first, tuple):
        entries = [_join_objects(list(column)) for column in zip(*pieces, strict=True)]
        return type(first)(*entries) if hasattr(first, "_fields") else tuple(entries)
    return concat_nested(pieces) if isinstance(first, torch.Tensor) else pieces


# ---- Flags -----------------------------------------------------------------------------------------------------------


class SynchronizedFlags:
    """Flags of an object that are raised in all processes or in none; all processes synchronize at the same places.

    A process that raises a flag waits for the others. A process without raised flags continues, and reads the flags of
    the others at its next call, so that steps without flags do not wait.
    """

    def __init__(self, names: Sequence[str], processes: int):
        self.names = tuple(names)
        self.processes = processes
        # Counts of the last call, and their all_reduce.
        self._last_call: tuple[torch.Tensor, Any] | None = None
        # Flags that only some processes raised: all raise them at the next call.
        self._late: set[str] = set()
        # Flags that this process decides for all.
        self.decided_here: set[str] = set()
        self._warned: set[str] = set()
        self._were_ready = False

    def sync(self, holder: Any, among: Sequence[str] | None = None, is_ready: bool = False) -> bool:
        """Lower flags that only some processes raise, and raise them in all processes at the next call.

        Parameters:
            among: the flags to synchronize; default: all.
            is_ready: whether this process is ready for a common action.

        Returns:
            whether all processes were ready at the last call.
        """
        names = self.names if among is None else among
        self.finish()
        were_ready = self._were_ready
        for name in self._late.intersection(names):
            self._late.discard(name)
            setattr(holder, name, True)
        raised = [name in names and bool(getattr(holder, name)) for name in self.names]
        counts = torch.tensor([*raised, is_ready], dtype=torch.int64)
        work = None
        if is_distributed():
            with _name_lost_processes() as groups:
                work = dist.all_reduce(counts, group=groups.background, async_op=True)
        self._last_call = counts, work
        if any(raised):
            self.finish()
            for name in self._late.intersection(names):
                if getattr(holder, name):
                    setattr(holder, name, False)
                    if name not in self.decided_here:
                        self._warn(name)
        return were_ready

    def finish(self) -> None:
        """Wait for the all_reduce of the last call, and record flags that are late."""
        if self._last_call is None:
            return
        (counts, work), self._last_call = self._last_call, None
        if work is not None:
            with _name_lost_processes():
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
