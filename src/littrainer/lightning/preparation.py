"""What a module does to its model before a training, its optimizer and schedule, and clipping before each step."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from littrainer.arguments.choices import SchedulerType
from littrainer.arguments.sharding import sharding_plan
from littrainer.errors.lazy_isinstance import is_a
from littrainer.lightning.evaluation import VALIDATION, with_prefix
from littrainer.optim.optimizers import build_optimizer, optimizer_class_and_keywords
from littrainer.optim.schedules import get_scheduler, steps_with_metric
from littrainer.optim.stepping import clip_by_norm, updates_during_backward
from littrainer.strategies.mixed_precision import FORWARD_TYPES
from littrainer.training.model_preparation import (
    align_special_tokens,
    apply_liger_kernels,
    enable_activation_checkpointing,
    noisy_embeddings,
)

UNKNOWN_LENGTH = (
    "How many steps there are is not known: the loader has no length, or training has no end. Give "
    "lightning.Trainer(max_steps=...), or choose lr_scheduler_type='constant'."
)


# ---- The model -------------------------------------------------------------------------------------------------------


def put_into_training_mode(model: nn.Module, is_whole: bool = True) -> None:
    """Put a model into training mode if it is in evaluation mode, and each model of transformers within it.

    `from_pretrained` leaves a model in evaluation mode. What is so within a model in training mode, its user wants so.
    """
    is_loaded = is_a(model, "model of transformers")
    if not model.training and (is_whole or is_loaded):
        model.train()
    elif not is_loaded:
        for part in model.children():
            put_into_training_mode(part, is_whole=False)


@contextmanager
def prepared_for_training(module: Any) -> Iterator[None]:
    """Prepare the model as the arguments ask, in the order in which a Trainer does it; hooks go when the block ends.

    Raises:
        ImportError: a library that an argument needs is not installed.
        ValueError: the model lacks what an argument needs.
    """
    apply_liger_kernels(module.model, module.args)
    enable_activation_checkpointing(module.model, module.args)
    align_special_tokens(module.model, module.processing_class)
    with noisy_embeddings(module.model, module.args.neftune_noise_alpha):
        yield


def split_model(model: nn.Module, strategy: Any, args: Any) -> int:
    """Split a model in place: its layers by its tensor parallel plan, and what is left of them by FSDP2.

    A model that is split already is left as it is. Other strategies do without.

    Parameters:
        strategy: that of the lightning.Trainer; its data and tensor parallel sizes say over how many processes.
        args: training arguments; `fsdp` and `fsdp_config` say which layers are sharded each for itself.

    Returns:
        processes that compute each layer together.
    """
    if not isinstance(strategy, ModelParallelStrategy):
        return 1
    mesh: Any = strategy.device_mesh
    shards, together = mesh["data_parallel"].size(), mesh["tensor_parallel"].size()
    if together > 1:
        from littrainer.strategies.tensor_parallel import parallelize_by_plan

        parallelize_by_plan(model, mesh["tensor_parallel"])
    if shards > 1 and not is_a(model, "resharding module"):
        from littrainer.strategies.sharded import shard

        computes_in = FORWARD_TYPES.get(strategy.precision_plugin.precision)
        shard(model, _plan_of(args), mesh["data_parallel"], strategy.root_device, computes_in)
    return together


def _plan_of(args: Any) -> Any:
    """The plan of sharding that arguments ask for; by default that of `fsdp=True`."""
    plan = sharding_plan(args)
    if plan is not None:
        return plan
    asking = copy.copy(args)
    asking.fsdp, asking.fsdp_config = True, args.fsdp_config or {"version": 2}
    return sharding_plan(asking)


# ---- Optimizer, schedule and clipping --------------------------------------------------------------------------------


def check_accumulation(pl_trainer: pl.Trainer) -> None:
    """Refuse accumulation if the strategy divides the loss.

    Raises:
        ValueError: the strategy accumulates by itself, over its own windows.
    """
    if pl_trainer.strategy.handles_gradient_accumulation and pl_trainer.accumulate_grad_batches > 1:
        raise ValueError(
            f"accumulate_grad_batches={pl_trainer.accumulate_grad_batches} with {type(pl_trainer.strategy).__name__}, "
            "which divides each loss by the number of micro-batches, and not by the label tokens of the window. Set "
            "accumulate_grad_batches=1 and larger batches, use FSDP, or train with littrainer.Trainer and deepspeed=."
        )


def make_optimizer(module: Any) -> Any:
    """The optimizer that a module was given, or that its arguments name."""
    given = module.given_optimizers[0]
    if given is not None:
        return given
    chosen = module.optimizer_cls_and_kwargs or optimizer_class_and_keywords(module.args, module.model)
    optimizer = build_optimizer(module.model, module.optimizer_groups(), *chosen)
    if updates_during_backward(optimizer):
        raise ValueError(
            f"optim={module.args.optim!r} updates the weights in a backward pass that a lightning.Trainer "
            "does not call. Train with littrainer.Trainer, or choose another optim."
        )
    return optimizer


def make_schedule(module: Any, optimizer: Any, num_training_steps: float | None) -> Any:
    """The schedule that a module was given, or that its arguments name.

    Parameters:
        num_training_steps: optimizer steps of the whole training; None, infinity or -1 if nobody knows.

    Raises:
        ValueError: the schedule needs to know the number of steps.
    """
    given = module.given_optimizers[1]
    if given is not None:
        return given
    args, options = module.args, module.args.lr_scheduler_kwargs
    steps = None
    if num_training_steps is not None and 0 <= num_training_steps < math.inf:
        steps = int(num_training_steps)
    if steps is None and 0 < args.warmup_steps < 1:
        raise ValueError(f"warmup_steps={args.warmup_steps} is a share of all optimizer steps. {UNKNOWN_LENGTH}")
    try:
        return get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=int(args.warmup_steps) if steps is None else args.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=options,
        )
    except ValueError as error:
        if steps is None and "num_training_steps" in str(error):
            name = SchedulerType(args.lr_scheduler_type).value
            raise ValueError(f"lr_scheduler_type={name!r} ends with the training. {UNKNOWN_LENGTH}") from error
        raise


def for_lightning(module: Any, optimizer: Any, schedule: Any) -> dict[str, Any]:
    """Optimizer and schedule as `configure_optimizers` returns them; the schedule steps with the optimizer.

    One that follows a metric steps once in an epoch, with that metric of the validation.
    """
    if not steps_with_metric(schedule):
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
    following = {"interval": "epoch", "monitor": with_prefix(VALIDATION, module.args.metric_for_best_model or "loss")}
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "reduce_on_plateau": True, **following}}


def clip_gradients(
    module: pl.LightningModule, optimizer: Any, gradient_clip_val: float | None, algorithm: str | None, default: float
) -> None:
    """Clip as the lightning.Trainer says, or if it says nothing to a 2-norm.

    Lightning itself refuses to clip with a fused optimizer under mixed precision, which is what a Trainer's defaults
    are.

    Parameters:
        gradient_clip_val, algorithm: those of the lightning.Trainer.
        default: the 2-norm, that of `max_grad_norm`; 0 or below clips nothing.
    """
    bound = default if gradient_clip_val is None else gradient_clip_val
    if bound <= 0:
        return
    scaler = getattr(module.trainer.precision_plugin, "scaler", None)
    # Lightning leaves it to a fused optimizer, which would do so in its step.
    if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
        scaler.unscale_(optimizer)
    if gradient_clip_val is not None and algorithm == "value":
        nn.utils.clip_grad_value_(module.parameters(), bound)
        return
    root: Any = module.trainer.strategy.model
    if callable(getattr(root, "clip_grad_norm_", None)):
        # FullyShardedDataParallel, whose parameters are parts of one long vector, sums over the processes.
        root.clip_grad_norm_(bound)
    else:
        clip_by_norm(module.parameters(), bound)
