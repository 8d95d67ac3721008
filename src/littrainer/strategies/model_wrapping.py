"""The model as training steps call it: under autocast, in DDP with several processes, compiled on request."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from littrainer.arguments.deepspeed import has_deepspeed
from littrainer.arguments.destinations import get_lightning_precision
from littrainer.arguments.process import NO_COMPILATION
from littrainer.arguments.sharding import get_sharding_plan
from littrainer.model.traversal import move_model
from littrainer.runtime.nested_values import map_nested
from littrainer.runtime.weak_attributes import WeaklyBound

AUTOCAST_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
HALF_TYPES = (torch.float16, torch.bfloat16)

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.trainer_context import TrainerContext


def wrap_for_training(trainer: TrainerContext, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Return the model as training steps call it, in an earlier training's wrapper if possible.

    Parameters:
        wrap: the Trainer's overridable `_wrap_model`.
    """
    model = trainer.model
    current = trainer.model_wrapped if id(model) in map(id, trainer.model_wrapped.modules()) else model
    if (
        current is not model
        and is_wrapped_by_trainer(current, model)
        and not _is_reusable(current, model, trainer.lightning_module)
    ):
        current = model
    wrapped = wrap(current)
    # As in transformers, a subclass's wrapper is called unchanged.
    if wrapped is model or is_compiled(wrapped):
        return autocast_and_compile(model, trainer.args, wrapped, _get_ddp_wrapper(trainer.lightning_module))
    return wrapped


def autocast_and_compile(
    model: nn.Module,
    args: TrainingArguments,
    wrapped: nn.Module | None = None,
    wrap_in_ddp: Callable[[nn.Module], nn.Module] | None = None,
) -> nn.Module:
    """Run the model's forward under autocast, and return the model, in DDP and compiled on request.

    Parameters:
        wrapped: the model, or its compiled module of an earlier training.
    """
    dtype = get_autocast_dtype(args)
    # FSDP2 has its own mixed precision policy.
    plan = get_sharding_plan(args)
    if dtype is not None and (plan is None or plan.version == 1):
        autocast_forward(model, args.device.type, dtype)
    if wrapped is not None and wrapped is not model:
        return wrapped
    if wrap_in_ddp is not None:
        model = wrap_in_ddp(model)
    keywords = get_compile_keywords(args)
    if keywords is None or is_compiled(model):
        return model
    compiled: Any = torch.compile(model, **keywords)
    return compiled


def get_compile_keywords(args: Any) -> dict[str, Any] | None:
    backend = (args.torch_compile_backend or NO_COMPILATION).lower()
    if not args.torch_compile or backend == NO_COMPILATION:
        return None
    keywords: dict[str, Any] = {"backend": backend}
    if args.torch_compile_mode is not None:
        keywords["mode"] = args.torch_compile_mode
    return keywords


def is_compiled(model: nn.Module) -> bool:
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    return compiled is not None and isinstance(model, compiled)


def move_to_device(model: nn.Module, args: TrainingArguments) -> None:
    """Move the model to this process's device; FSDP moves its shards itself."""
    if get_sharding_plan(args) is None:
        move_model(model, args.device)


def rewrap_after_unfreezing(trainer: TrainerContext) -> None:
    """Wrap the model in DDP again if a callback has unfrozen parameters: DDP reduces a fixed set."""
    model, wrapped, wrap_in_ddp = trainer.model, trainer.model_wrapped, _get_ddp_wrapper(trainer.lightning_module)
    if wrap_in_ddp is None or wrapped is model or not is_wrapped_by_trainer(wrapped, model):
        return
    if not _is_reusable(wrapped, model, trainer.lightning_module):
        trainer.model_wrapped = autocast_and_compile(model, trainer.args, None, wrap_in_ddp)


def is_wrapped_by_trainer(wrapped: Any, model: nn.Module) -> bool:
    """Return whether only `autocast_and_compile` has wrapped the model."""
    inner = wrapped._orig_mod if is_compiled(wrapped) and wrapped is not model else wrapped
    return inner is model or (isinstance(inner, nn.parallel.DistributedDataParallel) and inner.module is model)


def _get_ddp_wrapper(lightning_module: Any) -> Any:
    return None if lightning_module is None else getattr(lightning_module.trainer.strategy, "wrap_in_ddp", None)


def _is_reusable(wrapped: Any, model: nn.Module, lightning_module: Any) -> bool:
    inner = wrapped._orig_mod if is_compiled(wrapped) else wrapped
    if _get_ddp_wrapper(lightning_module) is None:
        return not isinstance(inner, nn.parallel.DistributedDataParallel)
    from littrainer.strategies.data_parallel import is_reusable_ddp

    return is_reusable_ddp(inner, model)


# ---- Mixed precision: the forward runs under autocast and returns float32, for losses in float32 ---------------------


def get_autocast_dtype(args: Any) -> torch.dtype | None:
    """Return None without autocast, and with DeepSpeed."""
    return None if has_deepspeed(args) else AUTOCAST_DTYPES.get(get_lightning_precision(args))


def autocast_forward(model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """Run a model's forward under autocast, with float32 outputs, until `restore_forward`.

    Training does not restore it, so that later computations of a script match.
    """
    if "_original_forward" in vars(model):
        return
    forward: Any = model.forward
    function = getattr(forward, "__func__", None)
    if function is None:
        model._original_forward, model.forward = forward, _wrap_in_autocast(forward, device_type, dtype)
    else:
        # Bound weakly, so that a copy of the model calls its own forward.
        original: Any = WeaklyBound(function, model)
        in_half: Any = WeaklyBound(_wrap_in_autocast(function, device_type, dtype), model)
        model._original_forward, model.forward = original, in_half


def restore_forward(model: nn.Module) -> None:
    original: Any = vars(model).pop("_original_forward", None)
    if original is not None:
        model.forward = original


def _wrap_in_autocast(forward: Callable[..., Any], device_type: str, dtype: torch.dtype) -> Callable[..., Any]:
    @functools.wraps(forward)
    def forward_in_half_precision(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype=dtype):
            outputs = forward(*args, **kwargs)
        return map_nested(_convert_to_float32, outputs)

    return forward_in_half_precision


def _convert_to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALF_TYPES else value
