"""What `trainer.accelerator` answers: the names that Trainer subclasses call, for one process, without accelerate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


class AcceleratorFacade:
    """Stands where subclasses of a Trainer expect an accelerator.

    Parameters:
        args: the training arguments, which know device and ranks.
    """

    def __init__(self, args: TrainingArguments):
        self._args = args
        self.module: Any = None

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
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._args.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return self._args.local_process_index == 0

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backward pass, through Lightning's precision plugin and strategy while it is training."""
        if self.module is None:
            loss.backward(**kwargs)
        else:
            self.module.manual_backward(loss, **kwargs)

    def unwrap_model(self, model: nn.Module, **_: Any) -> nn.Module:
        """The user's model inside a wrapper; `torch.compile` and data-parallel wrappers are taken off."""
        for attribute in ("_orig_mod", "module"):
            inner = getattr(model, attribute, None)
            if isinstance(inner, nn.Module) and type(model).__module__.startswith("torch."):
                return self.unwrap_model(inner)
        return model

    def gather(self, tensor: Any) -> Any:
        """The values of all processes; with one process, its own."""
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`, without samples that were only there to fill the last batch."""
        return input_data

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Tensors padded to the longest one of all processes; with one process, its own."""
        return tensor

    def wait_for_everyone(self) -> None:
        """Wait until all processes are here; with one process, at once."""

    def print(self, *values: Any, **kwargs: Any) -> None:
        """Print once for all processes."""
        if self.is_local_main_process:
            print(*values, **kwargs)
