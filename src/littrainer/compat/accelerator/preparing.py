"""The members of an accelerator that prepare a script's own models, optimizers and loaders, and forget them again."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from littrainer.arguments.deepspeed import asks_for_deepspeed
from littrainer.compat.accelerator.stepping import PreparedOptimizer, PreparedScheduler
from littrainer.data.loaders import LookaheadLoader, lookahead_version
from littrainer.distributed import collectives
from littrainer.model.facts import WRAPPERS
from littrainer.model.traversal import move_to
from littrainer.strategies.mixed_precision import forward_type, restore_forward, run_forward_in
from littrainer.strategies.model_wrapping import compile_keywords, is_compiled

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


class Preparing:
    """The methods that prepare a subclass's own objects, so that they run as the Trainer's do."""

    _args: TrainingArguments
    _optimizers: list[PreparedOptimizer]
    dataloader_config: Any
    gradient_state: Any

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """Prepare each object by its kind; anything else is returned as it is.

        Parameters:
            objects: loaders, models, optimizers and schedules, in any order.
            device_placement: False leaves models where they are.

        Returns:
            one object, or as many as were given, in their order.
        """
        # A schedule looks for the optimizer it belongs to among the prepared ones.
        first = [self._prepared(one, device_placement) for one in objects]
        prepared = tuple(self.prepare_scheduler(one) if isinstance(one, LRScheduler) else one for one in first)
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepared(self, one: Any, device_placement: Any) -> Any:
        if isinstance(one, DataLoader):
            return self.prepare_data_loader(one, device_placement=device_placement)
        if isinstance(one, nn.Module):
            return self.prepare_model(one, device_placement=device_placement)
        if isinstance(one, torch.optim.Optimizer):
            return self.prepare_optimizer(one, device_placement=device_placement)
        return one

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Move a model to this process's device; put it in mixed precision and compile it if the arguments say so.

        Parameters:
            device_placement: False leaves it where it is.
            evaluation_mode: it is not trained, so several processes do not exchange its gradients.

        Raises:
            NotImplementedError: DeepSpeed carries the training out, and this is another model to be trained.
        """
        args = self._args
        if asks_for_deepspeed(args) and not evaluation_mode:
            _refuse_second_engine(model)
        if getattr(model, "_is_accelerate_prepared", False):
            return model
        dtype = forward_type(args)
        if dtype is not None:
            run_forward_in(model, args.device.type, dtype)
        if device_placement is not False:
            move_to(model, args.device)
        prepared: Any = model
        trains = any(parameter.requires_grad for parameter in model.parameters())
        if collectives.process_count() > 1 and trains and not evaluation_mode:
            prepared = DistributedDataParallel(model, device_ids=None if args.device.type == "cpu" else [args.device])
        keywords = compile_keywords(args)
        if keywords is not None and not is_compiled(prepared):
            prepared = torch.compile(prepared, **keywords)
        prepared._is_accelerate_prepared = True
        return prepared

    def prepare_data_loader(
        self, data_loader: DataLoader, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> DataLoader:
        """Return a loader of this process's part of the data, with the order and the look-ahead of the Trainer's.

        Parameters:
            device_placement: False leaves its batches on the host; `_prepare_inputs` moves them anyway.
            slice_fn_for_dispatch: cuts the part of a process out of a batch that the first process has read; takes the
                batch, a slice of rows, and by name `process_index` and `num_processes`. Without effect in one process.

        Raises:
            ValueError: its batches cannot be shared out between the processes.
        """
        settings = self.dataloader_config
        prepared: Any = lookahead_version(self._args, data_loader, settings, slice_fn_for_dispatch)
        if isinstance(prepared, LookaheadLoader):
            prepared.gradient_state = self.gradient_state
            if device_placement is not False:
                prepared.hand_out_on(self._args.device, settings)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """Return an optimizer that steps and clears its gradients with the Trainer's optimizer steps."""
        prepared = optimizer if isinstance(optimizer, PreparedOptimizer) else PreparedOptimizer(optimizer, self)
        if not any(prepared is known for known in self._optimizers):
            self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return a schedule that steps with the prepared optimizer it drives."""
        if not isinstance(scheduler, PreparedScheduler):
            driven = getattr(scheduler, "optimizer", None)
            own = [one for one in self._optimizers if driven is one or driven is one.optimizer]
            scheduler = PreparedScheduler(scheduler, own or list(self._optimizers), self)
        return scheduler

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's model inside data-parallel wrappers.

        Parameters:
            keep_fp32_wrapper: leave it running in mixed precision, if it does.
            keep_torch_compile: leave it compiled, if it is.
        """
        if is_compiled(model):
            inner: Any = self.unwrap_model(model._orig_mod, keep_fp32_wrapper, keep_torch_compile)  # type: ignore[arg-type]
            if not keep_torch_compile:
                return inner
            model._orig_mod = inner
            return model
        inner = getattr(model, "module", None)
        if isinstance(inner, nn.Module) and type(model).__module__.partition(".")[0] in WRAPPERS:
            return self.unwrap_model(inner, keep_fp32_wrapper, keep_torch_compile)
        if not keep_fp32_wrapper:
            restore_forward(model)
        return model

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget prepared optimizers and empty the device's cache.

        Returns:
            None for each object given, to be assigned to it.
        """
        self._optimizers.clear()
        gc.collect()
        if self._args.device.type == "cuda":
            torch.cuda.empty_cache()
        return [None] * len(objects)

    clear = free_memory


def _refuse_second_engine(model: nn.Module) -> None:
    is_engine = type(model).__module__.partition(".")[0] == "deepspeed"
    if not is_engine and any(parameter.requires_grad for parameter in model.parameters()):
        raise NotImplementedError(
            f"accelerator.prepare({type(model).__name__}): DeepSpeed's engine holds the Trainer's model, and another "
            "one that is trained needs another engine: make it by deepspeed.initialize(model=..., "
            "config=accelerator.state.deepspeed_plugin.deepspeed_config). Prepare one that is not trained by "
            "accelerator.prepare_model(model, evaluation_mode=True)."
        )
