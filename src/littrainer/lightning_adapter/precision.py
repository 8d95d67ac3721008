"""The precision plugins that Lightning needs for a Trainer's mixed precision, one kind for each kind of strategy."""

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
    """What a Trainer does by itself, and its plugin therefore does not: autocast, and the move of each batch."""

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Nothing to enter: the model does so."""
        yield

    def convert_module(self, module: nn.Module) -> nn.Module:
        """The module in the number formats that its user has given it."""
        return module

    def convert_input(self, data: Any) -> Any:
        """The batch as it is: the Trainer's overridable `_prepare_inputs` makes of it what the model gets."""
        return data

    def convert_output(self, data: Any) -> Any:
        """The outputs as they are: the model's forward returns what a Trainer computes with."""
        return data


class _ScaledPrecision(GradScalerMixin, _PassThroughPrecision):
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Backward pass and clipping, then a step, unless the scaler finds gradients that are not finite."""
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        closure()
        optimizer = model.sync_optimizer()
        self.unscale(optimizer)
        self._after_closure(model, optimizer)
        model.step_optimizer()


class ForwardMixedPrecision(_ScaledPrecision, MixedPrecision):
    """Lightning's mixed precision for a model whose forward enters autocast by itself, or computes in half precision.

    Lightning would run the whole step under autocast, loss and metrics included, where a Trainer runs the model alone.
    Gradients are unscaled before they are clipped, with any optimizer.
    """


class ForwardFSDPPrecision(_ScaledPrecision, FSDPPrecision):
    """The same for version 1 of FSDP, whose strategy asks its plugin what parameters are gathered in."""

    def __init__(self, precision: Any, scaler: torch.amp.GradScaler | None = None):
        FSDPPrecision.__init__(self, precision)
        self.scaler = scaler

    @property
    def mixed_precision_config(self) -> Any:
        """What parameters are gathered and gradients reduced in; None for the model's own number formats."""
        return None if self.precision == FULL_PRECISION else super().mixed_precision_config


class TrainerDeepSpeedPrecision(_PassThroughPrecision, DeepSpeedPrecision):
    """Backward pass and step by the Trainer's own engine, which is around the user's model."""

    # The optimizer that has stepped last.
    _optimizer: Any = None

    @property
    def step_was_skipped(self) -> bool:
        """Whether gradients of fp16 were not finite at the last step."""
        return bool(getattr(self._optimizer, "step_was_skipped", False))

    def unscale(self, optimizer: Any) -> None:
        """Do nothing: the engine has divided its scale out."""

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Backward pass, and with the last micro-batch of a window the step."""
        if model.automatic_optimization:
            # The Trainer has divided by the true size of the window.
            kwargs["scale_wrt_gas"] = False
        engine, closes_window = model.owner.deepspeed, model.owner.accelerator.sync_gradients
        engine.set_gradient_accumulation_boundary(is_boundary=closes_window)
        engine.backward(tensor, **kwargs)
        if closes_window:
            engine.step()

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:  # type: ignore[override]
        """Do what surrounds the step that the engine has taken within the backward pass."""
        self._optimizer = optimizer
        result = closure()
        self._after_closure(model, optimizer)
        # A schedule watches whether its optimizer steps.
        optimizer.step()
        return result


def precision_plugin(
    precision: Any, strategy: Any, args: TrainingArguments, scaler: Any, trained_model: nn.Module | None
) -> Precision | None:
    """Return the plugin for one of Lightning's precisions under a strategy; None if Lightning's own choice does.

    Parameters:
        precision: as `lightning.Trainer` takes it.
        strategy: the strategy, or its name.
        scaler: the Trainer's gradient scaler, since its scale outlives a training; None if none is needed.
        trained_model: the model in a training, else None.

    Raises:
        ValueError: no plugin does both.
    """
    if isinstance(strategy, TrainerDeepSpeedStrategy):
        return TrainerDeepSpeedPrecision(precision)
    if isinstance(strategy, FSDPStrategy):
        return ForwardFSDPPrecision(precision, scaler)
    if precision == FULL_PRECISION:
        return None
    beside_split = _describe_mixed_sharding(args, trained_model) if precision == "16-mixed" else None
    if beside_split is not None:
        raise ValueError(
            f"fp16=True does not go with {beside_split}: losses would have to be scaled for gradients that are split "
            "between processes and for whole ones at once. Set bf16=True."
        )
    return ForwardMixedPrecision(precision, args.device.type, scaler)


def _describe_mixed_sharding(args: TrainingArguments, trained_model: nn.Module | None) -> str | None:
    """What leaves some gradients whole and splits others between processes; None if nothing does."""
    if tensor_parallel_size(args) > 1:
        return "tensor parallelism (tp_size)"
    plan = get_sharding_plan(args)
    if plan is None or trained_model is None:
        return None
    is_trained = any(one.requires_grad for one in find_ignored_parameters(trained_model, plan.ignored_modules))
    return f"ignored_modules={plan.ignored_modules!r} of fsdp_config, which are trained" if is_trained else None
