"""Precision plugins of Lightning for a Trainer's mixed precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, FSDPPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

from littrainer.arguments.destinations import FULL_PRECISION
from littrainer.arguments.sharding import get_sharding_plan
from littrainer.distributed.layout import tensor_parallel_size
from littrainer.optim.stepping import GradScalerMixin
from littrainer.strategies.deepspeed import TrainerDeepSpeedStrategy
from littrainer.strategies.fsdp2 import find_ignored_parameters

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


class _PassThroughPrecision(Precision):
    """A plugin without autocast and conversion; the Trainer does both."""

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        yield

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module

    def convert_input(self, data: Any) -> Any:
        return data

    def convert_output(self, data: Any) -> Any:
        return data


class _ScaledPrecision(GradScalerMixin, _PassThroughPrecision):
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        closure()
        optimizer = model.sync_optimizer()
        self.unscale(optimizer)
        self._after_closure(model, optimizer)
        model.step_optimizer()


class ForwardMixedPrecision(_ScaledPrecision, MixedPrecision):
    """Lightning's mixed precision, but with autocast only around the model's forward, and gradients unscaled before
    clipping.
    """


class ForwardFSDPPrecision(_ScaledPrecision, FSDPPrecision):
    """`ForwardMixedPrecision` for FSDP 1, whose strategy reads the dtypes from `mixed_precision_config`."""

    def __init__(self, precision: Any, scaler: torch.amp.GradScaler | None = None):
        FSDPPrecision.__init__(self, precision)
        self.scaler = scaler

    @property
    def mixed_precision_config(self) -> Any:
        return None if self.precision == FULL_PRECISION else super().mixed_precision_config


class TrainerDeepSpeedPrecision(_PassThroughPrecision, DeepSpeedPrecision):
    """A plugin that uses the Trainer's DeepSpeed engine."""

    _optimizer: Any = None

    @property
    def step_was_skipped(self) -> bool:
        return bool(getattr(self._optimizer, "step_was_skipped", False))

    def unscale(self, optimizer: Any) -> None:
        """Do nothing: the engine unscales."""

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if model.automatic_optimization:
            # The Trainer has divided the loss.
            kwargs["scale_wrt_gas"] = False
        engine, is_last_of_step = model.owner.deepspeed, model.owner.accelerator.sync_gradients
        engine.set_gradient_accumulation_boundary(is_boundary=is_last_of_step)
        engine.backward(tensor, **kwargs)
        if is_last_of_step:
            engine.step()

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:  # type: ignore[override]
        self._optimizer = optimizer
        result = closure()
        self._after_closure(model, optimizer)
        # No update, which the engine has made; schedules check that their optimizer steps.
        optimizer.step()
        return result


def build_precision_plugin(
    precision: Any, strategy: Any, args: TrainingArguments, scaler: Any, trained_model: nn.Module | None
) -> Precision | None:
    """Return the plugin, or its name; None for Lightning's default.

    Parameters:
        trained_model: None outside of training.

    Raises:
        ValueError: fp16 cannot be combined with the strategy.
    """
    if isinstance(strategy, TrainerDeepSpeedStrategy):
        return TrainerDeepSpeedPrecision(precision)
    if isinstance(strategy, FSDPStrategy):
        return ForwardFSDPPrecision(precision, scaler)
    if precision == FULL_PRECISION:
        return None
    mixed_sharding = _describe_mixed_sharding(args, trained_model) if precision == "16-mixed" else None
    if mixed_sharding is not None:
        raise ValueError(
            f"fp16=True does not go with {mixed_sharding}: loss scaling does not support sharded and replicated "
            "gradients at once. Set bf16=True."
        )
    return ForwardMixedPrecision(precision, args.device.type, scaler)


def _describe_mixed_sharding(args: TrainingArguments, trained_model: nn.Module | None) -> str | None:
    if tensor_parallel_size(args) > 1:
        return "tensor parallelism (tp_size)"
    plan = get_sharding_plan(args)
    if plan is None or trained_model is None:
        return None
    is_trained = any(
        parameter.requires_grad for parameter in find_ignored_parameters(trained_model, plan.ignored_modules)
    )
    return f"ignored_modules={plan.ignored_modules!r} of fsdp_config, which are trained" if is_trained else None
