"""The precision plugins of Lightning for a Trainer's mixed precision, by kind of strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, FSDPPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

from littrainer.arguments.destinations import FULL_PRECISION
from littrainer.arguments.sharding import sharding_plan
from littrainer.distributed.layout import tensor_parallel_size
from littrainer.optim.stepping import GradScalerMixin
from littrainer.strategies.deepspeed import TrainerDeepSpeedStrategy
from littrainer.strategies.sharded import ignored_parameters

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


class _PassThroughPrecision(Precision):
    """A plugin without autocast and conversion of inputs; the Trainer does both."""

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Enter nothing: the model enters autocast."""
        yield

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module in the dtypes that the user chose."""
        return module

    def convert_input(self, data: Any) -> Any:
        """Return the batch unchanged: the Trainer's overridable `_prepare_inputs` converts it."""
        return data

    def convert_output(self, data: Any) -> Any:
        """Return the outputs unchanged."""
        return data


class _ScaledPrecision(GradScalerMixin, _PassThroughPrecision):
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run backward pass and clipping, then a step unless a gradient is nonfinite."""
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        closure()
        optimizer = model.sync_optimizer()
        self.unscale(optimizer)
        self._after_closure(model, optimizer)
        model.step_optimizer()


class ForwardMixedPrecision(_ScaledPrecision, MixedPrecision):
    """Lightning's mixed precision for a model whose forward enters autocast or computes in half precision.

    Lightning runs the whole step under autocast, with loss and metrics, a Trainer the model alone. Gradients are
    unscaled before clipping, with any optimizer.
    """


class ForwardFSDPPrecision(_ScaledPrecision, FSDPPrecision):
    """The same plugin for FSDP 1, whose strategy reads the dtype of gathered parameters from it."""

    def __init__(self, precision: Any, scaler: torch.amp.GradScaler | None = None):
        FSDPPrecision.__init__(self, precision)
        self.scaler = scaler

    @property
    def mixed_precision_config(self) -> Any:
        """The dtypes of gathered parameters and reduced gradients; None for the model's dtypes."""
        return None if self.precision == FULL_PRECISION else super().mixed_precision_config


class TrainerDeepSpeedPrecision(_PassThroughPrecision, DeepSpeedPrecision):
    """A plugin whose backward pass and step are those of the Trainer's DeepSpeed engine."""

    # The optimizer of the last step.
    _optimizer: Any = None

    @property
    def step_was_skipped(self) -> bool:
        """Whether gradients of fp16 were nonfinite at the last step."""
        return bool(getattr(self._optimizer, "step_was_skipped", False))

    def unscale(self, optimizer: Any) -> None:
        """Do nothing: the engine unscales gradients."""

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass, and the step with the last micro-batch of a window."""
        if model.automatic_optimization:
            # The Trainer has divided the loss already.
            kwargs["scale_wrt_gas"] = False
        engine, closes_window = model.owner.deepspeed, model.owner.accelerator.sync_gradients
        engine.set_gradient_accumulation_boundary(is_boundary=closes_window)
        engine.backward(tensor, **kwargs)
        if closes_window:
            engine.step()

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:  # type: ignore[override]
        """Do the work around the step, which the engine took in the backward pass."""
        self._optimizer = optimizer
        result = closure()
        self._after_closure(model, optimizer)
        # Schedules check that their optimizer steps.
        optimizer.step()
        return result


def build_precision_plugin(
    precision: Any, strategy: Any, args: TrainingArguments, scaler: Any, trained_model: nn.Module | None
) -> Precision | None:
    """Return the plugin for a precision of Lightning under a strategy; None for Lightning's default.

    Parameters:
        strategy: the strategy, or its name.
        scaler: the Trainer's gradient scaler, whose scale outlives a training; None without loss scaling.
        trained_model: the model in a training, else None.

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
    """Return the setting that mixes sharded and replicated gradients; None without mix."""
    if tensor_parallel_size(args) > 1:
        return "tensor parallelism (tp_size)"
    plan = sharding_plan(args)
    if plan is None or trained_model is None:
        return None
    is_trained = any(parameter.requires_grad for parameter in ignored_parameters(trained_model, plan.ignored_modules))
    return f"ignored_modules={plan.ignored_modules!r} of fsdp_config, which are trained" if is_trained else None
