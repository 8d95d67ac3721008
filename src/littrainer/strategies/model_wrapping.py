"""The Trainer's model as steps call it: in mixed precision, in DDP with several processes, compiled if asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from littrainer.arguments.process import NO_COMPILATION
from littrainer.arguments.sharding import get_sharding_plan
from littrainer.model.traversal import move_model
from littrainer.strategies.mixed_precision import autocast_forward, get_autocast_dtype


def wrap_for_training(trainer: Any) -> nn.Module:
    """Prepare the model on its device, and return what training steps call.

    `trainer.model` stays the user's module, so that what is saved has its names. What wrapped it once is kept: a second
    training compiles nothing again.
    """
    model = trainer.model
    wrapped_before = any(part is model for part in trainer.model_wrapped.modules())
    before = trainer.model_wrapped if wrapped_before else model
    if before is not model and is_wrapped_by_trainer(before, model) and not _exchanges_as_needed(trainer, before):
        before = model
    wrapped = trainer._wrap_model(before)
    # What a subclass puts around the model is called as it is; so it is in transformers.
    if wrapped is model or is_compiled(wrapped):
        return autocast_and_compile(trainer, wrapped, _data_parallel(trainer))
    return wrapped


def autocast_and_compile(
    trainer: Any, wrapped: nn.Module | None = None, data_parallel: Callable[[nn.Module], nn.Module] | None = None
) -> nn.Module:
    """Let the model's forward run in mixed precision, and return it, compiled if the arguments ask for it.

    Parameters:
        wrapped: the model, or what an earlier training compiled it to.
        data_parallel: puts DDP around the model.
    """
    model = trainer.model
    dtype = get_autocast_dtype(trainer.args)
    plan = get_sharding_plan(trainer.args)
    # What is sharded computes in half precision by the policy that it is sharded with.
    if dtype is not None and (plan is None or plan.version == 1):
        autocast_forward(model, trainer.args.device.type, dtype)
    if wrapped is not None and wrapped is not model:
        return wrapped
    if data_parallel is not None:
        model = data_parallel(model)
    keywords = get_compile_keywords(trainer.args)
    if keywords is None or is_compiled(model):
        return model
    compiled: Any = torch.compile(model, **keywords)
    return compiled


def get_compile_keywords(args: Any) -> dict[str, Any] | None:
    """The keywords for `torch.compile`; None if nothing is compiled."""
    backend = (args.torch_compile_backend or NO_COMPILATION).lower()
    if not args.torch_compile or backend == NO_COMPILATION:
        return None
    keywords: dict[str, Any] = {"backend": backend}
    if args.torch_compile_mode is not None:
        keywords["mode"] = args.torch_compile_mode
    return keywords


def is_compiled(model: nn.Module) -> bool:
    """Whether this is what `torch.compile` returned."""
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    return compiled is not None and isinstance(model, compiled)


def move_to_device(trainer: Any) -> None:
    """Move the model to the device of this process; one that is sharded goes there part by part."""
    if not trainer.is_fsdp_enabled:
        move_model(trainer.model, trainer.args.device)


def rewrap_after_unfreezing(trainer: Any) -> None:
    """Put DDP around a model again whose trained parameters a callback has changed: gradients of further ones would not
    be exchanged.
    """
    wrapped, data_parallel = trainer.model_wrapped, _data_parallel(trainer)
    if data_parallel is None or wrapped is trainer.model or not is_wrapped_by_trainer(wrapped, trainer.model):
        return
    if not _exchanges_as_needed(trainer, wrapped):
        trainer.model_wrapped = autocast_and_compile(trainer, None, data_parallel)


def is_wrapped_by_trainer(wrapped: Any, model: nn.Module) -> bool:
    """Whether there is nothing around the model but what `autocast_and_compile` puts there."""
    inner = wrapped._orig_mod if is_compiled(wrapped) and wrapped is not model else wrapped
    return inner is model or (isinstance(inner, nn.parallel.DistributedDataParallel) and inner.module is model)


def _data_parallel(trainer: Any) -> Any:
    """What puts DDP around a model, while a strategy of that kind carries out a training; else None."""
    running = trainer.lightning_module
    return None if running is None else getattr(running.trainer.strategy, "data_parallel", None)


def _exchanges_as_needed(trainer: Any, wrapped: Any) -> bool:
    """Whether what was put around the model before serves the training that begins."""
    inner = wrapped._orig_mod if is_compiled(wrapped) else wrapped
    is_data_parallel = isinstance(inner, nn.parallel.DistributedDataParallel)
    if _data_parallel(trainer) is None:
        return not is_data_parallel
    from littrainer.strategies.data_parallel import is_reusable_ddp

    return is_reusable_ddp(inner, trainer.model)
