"""The members of an accelerator about steps, and prepared optimizers and schedules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from littrainer.arguments.sharding import sharding_plan
from littrainer.compat.accelerator.states import GradientView, HeldBy
from littrainer.errors.lazy_isinstance import is_a
from littrainer.optim.stepping import OptimizerAround, ScaledSteps, clip_by_norm
from littrainer.strategies.mixed_precision import forward_type

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


# What accelerate's accumulation is if nobody says otherwise.
ACCUMULATION_DEFAULTS = {"adjust_scheduler": True, "sync_with_dataloader": True, "sync_each_batch": False}


class PreparedOptimizer(ScaledSteps, OptimizerAround):
    """An optimizer that steps, and clears its gradients, only at the last micro-batch of an optimizer step.

    Parameters:
        optimizer: the optimizer that does the work.
        accelerator: knows whether the window closes, and scales the losses of fp16.
    """

    _is_accelerate_prepared = True

    def __init__(self, optimizer: torch.optim.Optimizer, accelerator: Any):
        super().__init__(optimizer)
        self.accelerator = accelerator

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """What scales the losses of fp16; None in any other precision."""
        return self.accelerator.scaler

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        self.optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, at the last micro-batch of an optimizer step."""
        if self.accelerator.sync_gradients:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> Any:
        """Step at the last micro-batch of an optimizer step; with fp16, only if gradients are finite."""
        if not self.accelerator.sync_gradients:
            return None
        if self.scaler is None:
            return self.optimizer.step(closure)
        return self.step_unless_infinite(self.optimizer, *(() if closure is None else (closure,)))

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class PreparedScheduler:
    """A schedule that steps with the optimizer steps that were taken.

    Parameters:
        scheduler: the schedule that does the work.
        optimizers: the prepared optimizers it belongs to; with fp16 any of them may skip a step.
        accelerator: knows whether the window closes.
    """

    _is_accelerate_prepared = True

    def __init__(self, scheduler: Any, optimizers: list[PreparedOptimizer], accelerator: Any):
        self.scheduler = scheduler
        self.optimizers = optimizers
        self.accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        if name in ("scheduler", "optimizers", "accelerator"):
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step if the optimizers have stepped; once for each process, unless batches are split between them."""
        if not self.accelerator.sync_gradients:
            if self.accelerator.gradient_state.adjust_scheduler:
                self.scheduler._step_count += 1
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        for _ in range(1 if self.accelerator.split_batches else self.accelerator.num_processes):
            # A schedule of fixed length refuses to step beyond it.
            if getattr(self.scheduler, "_step_count", 0) <= getattr(self.scheduler, "total_steps", float("inf")):
                self.scheduler.step(*args, **kwargs)


class Stepping:
    """The methods that a script's `training_step` calls."""

    _args: TrainingArguments
    step_scheduler_with_optimizer = True
    # Whether this micro-batch is the last one of its optimizer step.
    sync_gradients = HeldBy("gradient_state")

    def __init__(self) -> None:
        # The module that fit trains; None outside training.
        self.module: Any = None
        self.step = 0
        self._optimizers: list[PreparedOptimizer] = []
        self._scaler: torch.amp.GradScaler | None = None
        config: Any = self._args.accelerator_config
        asked = getattr(config, "gradient_accumulation_kwargs", None) or {}
        # The Trainer accumulates, so `num_steps` is 1; of the other settings those count that differ from the defaults.
        settings = {name: value for name, value in asked.items() if ACCUMULATION_DEFAULTS.get(name) is not value}
        self.gradient_state = GradientView(self, {**settings, "num_steps": 1})

    @property
    def gradient_accumulation_steps(self) -> int:
        """What `backward` divides by: 1, since the Trainer accumulates, unless a script sets it."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.gradient_state.plugin_kwargs["num_steps"] = value

    @property
    def mixed_precision(self) -> str:
        """What the forward pass computes in: `no`, `bf16` or `fp16`."""
        return self._args.mixed_precision

    @property
    def native_amp(self) -> bool:
        """Whether prepared models run their forward under autocast."""
        return forward_type(self._args) is not None

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """What scales the losses of fp16; None in any other precision, and on a CPU."""
        # In a training it was asked for before the first step, and stays what it is.
        if self._scaler is None and self.module is None and forward_type(self._args) is torch.float16:
            self._scaler = _new_scaler(self._args)
        return self._scaler

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of an optimizer was left out, since gradients of fp16 were not finite."""
        module = self.module
        if module is not None and getattr(module.trainer.precision_plugin, "step_was_skipped", False):
            return True
        return bool(self._optimizers) and any(optimizer.step_was_skipped for optimizer in self._optimizers)

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[Any]:
        """Return the context in which the model's forward computes.

        Parameters:
            autocast_handler: accelerate's AutocastKwargs, which may switch it off.
        """
        dtype = forward_type(self._args)
        if dtype is None:
            return nullcontext()
        settings = {} if autocast_handler is None else autocast_handler.to_kwargs()
        return torch.autocast(self._args.device.type, dtype=dtype, **settings)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Call backward, in a script's `training_step` through Lightning's precision plugin and strategy.

        Parameters:
            kwargs: handed on to torch; but `learning_rate`, which the schedule decides.
        """
        kwargs.pop("learning_rate", None)
        steps = self.gradient_accumulation_steps
        if steps != 1:
            loss = loss / steps
        module = self.module
        if module is not None and not module.automatic_optimization:
            module.manual_backward(loss, **kwargs)
        else:
            # A further backward pass in automatic optimization, or one outside of training.
            (loss if self.scaler is None else self.scaler.scale(loss)).backward(**kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide the scale of fp16 out of the gradients, unless that is done already.

        Parameters:
            optimizer: the optimizer that holds them, or several; by default the one that is training and all prepared
                ones.
        """
        if self.scaler is None:
            return
        own = None if self.module is None else self.module.trainer.optimizers[0]
        given = [*([] if own is None else [own]), *self._optimizers] if optimizer is None else optimizer
        for one in given if isinstance(given, (list, tuple)) else [given]:
            if isinstance(one, PreparedOptimizer):
                one.unscale(one.optimizer)
            elif one is own:
                self.module.trainer.precision_plugin.unscale(one)
            else:
                self.scaler.unscale_(one)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip gradients by their norm, and return the norm they had.

        Where parameters are split between processes, the norm is that of whole gradients. DeepSpeed clips by itself, as
        its config says; its norm is returned.
        """
        strategy: Any = None if self.module is None else self.module.trainer.strategy
        engine = getattr(strategy, "deepspeed_engine", None)
        if engine is not None:
            return engine.get_global_grad_norm()
        self.unscale_gradients()
        given: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        # With version 1 of FSDP each process has pieces of parameters, and their wrapper knows of the others.
        for wrapper in () if strategy is None else (strategy.model, self.module.owner.model_wrapped):
            if hasattr(wrapper, "clip_grad_norm_") and {*map(id, wrapper.parameters())} == {*map(id, given)}:
                return wrapper.clip_grad_norm_(max_norm, norm_type)
        return clip_by_norm(given, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each gradient to the range from `-clip_value` to `clip_value`."""
        self.unscale_gradients()
        nn.utils.clip_grad_value_(parameters, clip_value)

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        """Return a context in which several processes do not exchange the gradients of a model."""
        if is_a(model, "resharding module"):
            return _without_exchange(model)
        plugin = self._args.deepspeed_plugin
        if plugin is not None and plugin.zero_stage >= 2:
            # Its gradients are sharded when they come.
            return nullcontext()
        return model.no_sync() if callable(getattr(model, "no_sync", None)) else nullcontext()

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Run one micro-batch of a script's accumulation over `gradient_accumulation_steps` of them.

        That number is 1 unless the script sets it, so that each micro-batch closes a window.
        """
        state = self.gradient_state
        if state.sync_with_dataloader and state.end_of_dataloader:
            self.step, state.sync_gradients = 0, True
        else:
            self.step += 1
            state.sync_gradients = self.step % state.num_steps == 0
        with ExitStack() as stack:
            if not (state.sync_gradients or state.plugin_kwargs.get("sync_each_batch", False)):
                for model in models:
                    stack.enter_context(self.no_sync(model))
            yield


@contextmanager
def _without_exchange(model: Any) -> Iterator[None]:
    """Let a model that is sharded by FSDP add its gradients up in each process."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _new_scaler(args: TrainingArguments) -> torch.amp.GradScaler:
    plan = sharding_plan(args)
    if plan is None or plan.version > 1:
        return torch.amp.GradScaler(args.device.type)
    # Gradients of version 1 of FSDP do not say that they are parts, so the scaler asks all processes.
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return ShardedGradScaler(args.device.type)
