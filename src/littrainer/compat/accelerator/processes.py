"""The members of an accelerator that are about processes: who this one is, waiting, sharing and gathering."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from littrainer.arguments.process import distributed_type
from littrainer.distributed import collectives

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


class ProcessMembers:
    """What an accelerator and its state both answer.

    Parameters:
        args: the training arguments, which know device and ranks.
    """

    def __init__(self, args: TrainingArguments):
        self._args = args

    @property
    def device(self) -> torch.device:
        """The device this process trains on."""
        return self._args.device

    @property
    def num_processes(self) -> int:
        """World size."""
        return self._args.world_size

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return self._args.process_index

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its node."""
        return self._args.local_process_index

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._args.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return self._args.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the highest rank."""
        return self._args.process_index == self._args.world_size - 1

    @property
    def use_distributed(self) -> bool:
        """Whether several processes train together."""
        return self._args.world_size > 1

    @property
    def distributed_type(self) -> Any:
        """`NO`, `MULTI_CPU` or `MULTI_GPU`; accelerate's own member where accelerate is loaded."""
        return distributed_type(self._args)

    def wait_for_everyone(self) -> None:
        """Wait until all processes are here; with one process, at once.

        Raises:
            RuntimeError: there are several processes and no process group in which they could wait.
        """
        if self._args.world_size > 1:
            self._args._barrier("wait_for_everyone")()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let the first of all processes go through a block before the others."""
        return self._args.main_process_first(local=False, desc="a block of main_process_first")

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Let the first process of each node go through a block before the others of its node."""
        return self._args.main_process_first(local=True, desc="a block of local_main_process_first")

    def print(self, *values: Any, **kwargs: Any) -> None:
        """Print once on each node."""
        if self.is_local_main_process:
            print(*values, **kwargs)

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function so that the first of all processes runs it, and the others do nothing."""
        return _where(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function so that the first process of each node runs it."""
        return _where(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function so that the process of the highest rank runs it."""
        return _where(lambda: self.is_last_process, function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Decorate a function so that the process of that rank runs it; one process runs it whatever the rank."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return _where(lambda: self.process_index == process_index or not self.use_distributed, function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorate a function so that the process of that rank on each node runs it; one process always does."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return _where(lambda: self.local_process_index == local_process_index or not self.use_distributed, function)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's share of a list, tuple, tensor, dataset or dict of such; the first ranks get one more.

        Parameters:
            apply_padding: repeat the last entry until all shares are equally long.

        Raises:
            ValueError: the values of a dict differ in length.
        """
        yield share_of(inputs, self.process_index, self.num_processes, apply_padding)


class Collectives:
    """What an accelerator does with the values of all processes."""

    flag_tensor: torch.Tensor | None

    def gather(self, tensor: Any) -> Any:
        """The values of all processes; with one process, its own."""
        return collectives.gathered(tensor)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Tensors padded to the longest one of all processes; with one process, its own."""
        return collectives.padded_to_longest(tensor, dim, pad_index, pad_first)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Nested tensors reduced over all processes; those given stay as they are.

        Parameters:
            reduction: `sum`, `mean` or `max`; anything else sums, as under accelerate.
            scale: without effect, as under accelerate, which scales on TPUs only.
        """
        return collectives.reduced(tensor, reduction)

    def set_trigger(self) -> None:
        """Let the next `check_trigger` say yes in all processes."""
        self.flag_tensor = torch.tensor(1)

    def check_trigger(self) -> bool:
        """Whether any process has called `set_trigger` since the last yes."""
        mine = torch.tensor(0) if self.flag_tensor is None else self.flag_tensor
        was_set = bool(self.reduce(mine.to(self.device)) > 0)  # type: ignore[attr-defined]
        self.flag_tensor = torch.tensor(0) if was_set else mine
        return was_set


def _where(applies: Callable[[], bool], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def only_there(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if applies() else None

    return only_there


def share_of(inputs: Any, index: int, count: int, pad: bool = False) -> Any:
    """One of `count` shares of a collection; the first ones get one entry more where it does not divide evenly.

    Parameters:
        inputs: a list, tuple, tensor, dataset with `select`, or a mapping whose values are split alike. With one share,
            and for anything else, it is returned as it is.
        index: which share, from 0.
        pad: repeat the last entry until all shares are equally long.

    Raises:
        ValueError: the values of a mapping differ in length.
    """
    if count == 1:
        return inputs
    if isinstance(inputs, Mapping):
        lengths = {name: len(value) for name, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"split_between_processes needs values of equal length in a dict, and got {lengths}.")
        return type(inputs)({name: share_of(value, index, count, pad) for name, value in inputs.items()})  # type: ignore[call-arg]
    if not (isinstance(inputs, (list, tuple, torch.Tensor)) or callable(getattr(inputs, "select", None))):
        return inputs
    rows = _rows(len(inputs), index, count, pad)
    if isinstance(inputs, torch.Tensor):
        return inputs[rows]
    if isinstance(inputs, (list, tuple)):
        return type(inputs)(inputs[row] for row in rows)
    return inputs.select(rows)


def _rows(length: int, index: int, count: int, pad: bool) -> list[int]:
    each, further = divmod(length, count)
    start = index * each + min(index, further)
    rows = list(range(start, start + each + (index < further)))
    longest = each + (further > 0)
    return rows + [length - 1] * (longest - len(rows)) if pad and length else rows
