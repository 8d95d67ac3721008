"""Values of all processes, put together: the rows of each process follow those of the one before.

With one process, or without a process group, everything is returned as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from littrainer.errors.lazy_isinstance import is_a
from littrainer.errors.nested_values import concatenated, map_nested


def process_count() -> int:
    """Return the number of processes of the group that is up; 1 without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def process_rank() -> int:
    """Return the rank of this process in the group that is up; 0 without a group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gathered(value: Any, copies: int = 1) -> Any:
    """Return nested tensors of all processes, joined along their rows; a single number gives a row for each process.

    Parameters:
        copies: so many neighbouring processes hold the same values, which count once.

    Raises:
        TypeError: a leaf is no tensor.
    """
    return value if process_count() == 1 else map_nested(partial(_gathered_tensor, copies=copies), value)


def gathered_objects(value: Any, copies: int = 1) -> Any:
    """Return nested objects of all processes, pickled on their way.

    Parameters:
        copies: as for `gathered`.

    Lists are taken for one entry per sample and put one after the other, tensors are joined along their rows (and
    padded with -100 if they are not equally long), and what tuples and mappings hold is put together one by one.
    Anything else becomes a list with one entry for each process.
    """
    if process_count() == 1:
        return value
    pieces: list[Any] = [None] * process_count()
    on_host = map_nested(lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, value)
    dist.all_gather_object(pieces, on_host)
    return _joined_objects(pieces[::copies])


def padded_to_longest(value: Any, dim: int = 0, fill: int = 0, at_start: bool = False) -> Any:
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

    return value if process_count() == 1 else map_nested(pad, value)


def whole_tensor(value: Any) -> Any:
    """Return a tensor that is spread over processes as a whole, on the group's device; anything else as it is."""
    if not is_a(value, "sharded tensor"):
        return value
    device = value.device_mesh.device_type
    # Offloaded parts lie on the host, where the processes may have nothing to talk through.
    return (value if value.device.type == device else value.to(device)).full_tensor()


def reduced(value: Any, reduction: str = "sum") -> Any:
    """Return copies of nested tensors, put together over all processes.

    Parameters:
        reduction: `mean` or `max`; anything else sums.
    """

    def reduce(tensor: Any) -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"Only tensors can be reduced, not {type(tensor).__name__}; make it a tensor first.")
        total = tensor.clone()
        if process_count() > 1:
            dist.all_reduce(total, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM)
            if reduction == "mean":
                total /= process_count()
        return total

    return map_nested(reduce, value)


def sum_over_processes(number: float, device: torch.device, copies: int = 1) -> float:
    """Return the sum of the processes' numbers; of several in single precision, as in transformers."""
    if process_count() == 1:
        return number
    return gathered(torch.tensor([number], device=device), copies).sum().item()


def holds_only_tensors(value: Any) -> bool:
    """Return whether each leaf of a nested value is a tensor."""
    if isinstance(value, Mapping):
        return all(map(holds_only_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(holds_only_tensors, value))
    return isinstance(value, torch.Tensor)


def _gathered_tensor(tensor: Any, copies: int = 1) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"Only tensors can be gathered, not {type(tensor).__name__}; set eval_use_gather_object=True.")
    tensor = torch.atleast_1d(tensor).contiguous()
    # Processes may have different numbers of rows, and a collective of tensors needs equal shapes.
    rows = torch.tensor(tensor.shape[0], device=tensor.device)
    rows_of_each = [torch.empty_like(rows) for _ in range(process_count())]
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
        return [entry for piece in pieces for entry in piece]
    if isinstance(first, Mapping):
        return type(first)({name: _joined_objects([piece[name] for piece in pieces]) for name in first})  # type: ignore[call-arg]
    if isinstance(first, tuple):
        entries = [_joined_objects(list(column)) for column in zip(*pieces, strict=True)]
        return type(first)(*entries) if hasattr(first, "_fields") else tuple(entries)
    return concatenated(pieces) if isinstance(first, torch.Tensor) else pieces
