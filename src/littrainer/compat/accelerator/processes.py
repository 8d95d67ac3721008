"""The members of an accelerator about processes: ranks, waiting, sharing and gathering."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from littrainer.arguments.process import distributed_type
from littrainer.distributed import collectives

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


class ProcessMembers:
    """What an accelerator says about processes, and does with the values of all of them.

    Parameters:
        args: the training arguments, which know device and ranks.
    """

    def __init__(self, args: TrainingArguments):
        self._args = args

    device = property(lambda self: self._args.device, doc="The device this process trains on.")
    num_processes = property(lambda self: self._args.world_size, doc="World size.")
    process_index = property(lambda self: self._args.process_index, doc="Rank of this process.")
    local_process_index = property(lambda self: self._args.local_process_index, doc="Rank of this process on its node.")
    is_main_process = property(lambda self: self._args.process_index == 0, doc="Whether this is rank 0.")
    is_local_main_process = property(lambda self: self._args.local_process_index == 0, doc="First one of its node.")
    is_last_process = property(lambda self: self._args.process_index == self._args.world_size - 1, doc="Highest rank.")
    use_distributed = property(lambda self: self._args.world_size > 1, doc="Whether several processes train together.")
    # `NO` or `MULTI_GPU`, for instance; accelerate's own member if accelerate is loaded.
    distributed_type = property(lambda self: distributed_type(self._args))

    def wait_for_everyone(self) -> None:
        """Wait until all processes are here.

        Raises:
            RuntimeError: there are several processes and no process group in which they could wait.
        """
        if self._args.world_size > 1:
            self._args._barrier("wait_for_everyone")()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Run a block in the first of all processes before the others."""
        return self._args.main_process_first(local=False, desc="a block of main_process_first")

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Run a block in the first process of each node before the others of its node."""
        return self._args.main_process_first(local=True, desc="a block of local_main_process_first")

    def print(self, *values: Any, **kwargs: Any) -> None:
        """Print once on each node."""
        if self.is_local_main_process:
            print(*values, **kwargs)

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function so that only the first of all processes runs it."""
        return _where(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function so that only the first process of each node runs it."""
        return _where(lambda: self.is_local_main_process, function)

    def gather(self, tensor: Any) -> Any:
        """Return the values of all processes."""
        return collectives.gathered(tensor)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad tensors to the longest one of all processes."""
        return collectives.padded_to_longest(tensor, dim, pad_index, pad_first)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return nested tensors reduced over all processes.

        Parameters:
            reduction: `sum`, `mean` or `max`; anything else sums, as under accelerate.
            scale: without effect, as under accelerate, which scales on TPUs only.
        """
        return collectives.reduced(tensor, reduction)


def _where(applies: Callable[[], bool], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def only_there(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if applies() else None

    return only_there
