"""What `trainer.accelerator` answers: the names that Trainer subclasses call, for one process, without accelerate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from littrainer.data.loaders import lookahead_version
from littrainer.evaluation import across_processes
from littrainer.evaluation.gathering import truncated
from littrainer.mixed_precision import forward_type, restore_forward, run_forward_in

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
        self._scaler: torch.amp.GradScaler | None = None
        # Samples in the batch at hand where it is an evaluation's last and not a full one; set by the evaluation.
        self.samples_in_last_batch: int | None = None

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
    def is_last_process(self) -> bool:
        """Whether this is the highest rank."""
        return self._args.process_index == self._args.world_size - 1

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch is the last one of its optimizer step."""
        return self.module is None or self.module.closes_window

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._args.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return self._args.local_process_index == 0

    @property
    def mixed_precision(self) -> str:
        """What the forward pass computes in: `no`, `bf16` or `fp16`."""
        return self._args.mixed_precision

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """What scales the losses of fp16; None in any other precision, and on a CPU."""
        if self._scaler is None and forward_type(self._args) is torch.float16:
            self._scaler = torch.amp.GradScaler(self._args.device.type)
        return self._scaler

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last optimizer step was left out, since gradients of fp16 were not finite."""
        return self.module is not None and getattr(self.module.trainer.precision_plugin, "step_was_skipped", False)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which the model's forward computes."""
        dtype = forward_type(self._args)
        return nullcontext() if dtype is None else torch.autocast(self._args.device.type, dtype=dtype)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide the scale of fp16 out of the gradients, unless that is done already.

        Parameters:
            optimizer: the optimizer that holds them; by default the one that is training.
        """
        if self.module is not None and self.scaler is not None:
            optimizer = self.module.trainer.optimizers[0] if optimizer is None else optimizer
            self.module.trainer.precision_plugin.unscale(optimizer)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip gradients by their norm, and return the norm they had."""
        self.unscale_gradients()
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backward pass, through Lightning's precision plugin and strategy while it is training."""
        if self.module is None:
            loss.backward(**kwargs)
        else:
            self.module.manual_backward(loss, **kwargs)

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, **_: Any) -> nn.Module:
        """The user's model inside a wrapper; `torch.compile` and data-parallel wrappers are taken off.

        Parameters:
            keep_fp32_wrapper: leave it running in mixed precision, if it does.
        """
        for attribute in ("_orig_mod", "module"):
            inner = getattr(model, attribute, None)
            if isinstance(inner, nn.Module) and type(model).__module__.startswith("torch."):
                return self.unwrap_model(inner, keep_fp32_wrapper)
        if not keep_fp32_wrapper:
            restore_forward(model)
        return model

    def gather(self, tensor: Any) -> Any:
        """The values of all processes; with one process, its own."""
        return across_processes.gathered(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`, without samples that were only there to fill the last batch.

        Parameters:
            use_gather_object: gather Python objects, as is done for anything that holds more than tensors.
        """
        rows = self.samples_in_last_batch
        if rows is None and across_processes.process_count() == 1:
            return input_data
        if not use_gather_object and across_processes.holds_only_tensors(input_data):
            data = across_processes.gathered(input_data)
        else:
            data = across_processes.gathered_objects(input_data)
            if rows is not None and isinstance(data, list):
                return data[:rows]
        return data if rows is None else truncated(data, rows)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Tensors padded to the longest one of all processes; with one process, its own."""
        return across_processes.padded_to_longest(tensor, dim, pad_index, pad_first)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or mean over all processes; with one process, its own value, scaled where it is a mean."""
        return tensor * scale if reduction == "mean" and scale != 1.0 else tensor

    def prepare(self, *objects: Any, **_: Any) -> Any:
        """Loaders that look one batch ahead, as the Trainer's do; models on this process's device, running in mixed
        precision where the arguments ask for it; optimizers and schedules as they are.
        """
        prepared = tuple(self._prepared(one) for one in objects)
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepared(self, one: Any) -> Any:
        if isinstance(one, DataLoader):
            return lookahead_version(self._args, one)
        return self.prepare_model(one) if isinstance(one, nn.Module) else one

    def prepare_model(self, model: nn.Module, **_: Any) -> nn.Module:
        """The model on this process's device, running in mixed precision where the arguments ask for it."""
        dtype = forward_type(self._args)
        if dtype is not None:
            run_forward_in(model, self.device.type, dtype)
        return model.to(self.device)

    def no_sync(self, model: Any = None) -> AbstractContextManager[Any]:
        """A context without gradient synchronisation; one process has nothing to synchronise."""
        return nullcontext()

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's state dict."""
        return self.unwrap_model(model).state_dict()

    def free_memory(self, *objects: Any) -> list[None]:
        """Empty the device's cache; returns None for each object, to be assigned to it."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return [None] * len(objects)

    def end_training(self) -> None:
        """Leave the process group, where there is one."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let the first process go first; one process is the first."""
        yield

    local_main_process_first = main_process_first

    def wait_for_everyone(self) -> None:
        """Wait until all processes are here; with one process, at once."""

    def print(self, *values: Any, **kwargs: Any) -> None:
        """Print once on each node."""
        if self.is_local_main_process:
            print(*values, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"trainer.accelerator has no {name!r}: littrainer trains on Lightning, and answers what Trainer subclasses "
            f"commonly use of an accelerator. Ask trainer.lightning_trainer (its strategy), or torch, instead."
        )
