"""The optimizer and the schedule of a module, as a Trainer makes them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from littrainer.arguments.choices import SchedulerType
from littrainer.optim.optimizers import build_optimizer, optimizer_class_and_keywords
from littrainer.optim.schedules import get_scheduler, steps_with_metric
from littrainer.optim.stepping import updates_during_backward
from littrainer.plain_lightning.names import monitored_name

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from littrainer.plain_lightning.module import TransformersModule

UNKNOWN_LENGTH = (
    "How many steps there are is not known: the loader has no length, or training has no end. Give "
    "lightning.Trainer(max_steps=...), or choose lr_scheduler_type='constant'."
)


def check_accumulation(trainer: pl.Trainer) -> None:
    """Refuse accumulation where gradients are out of reach.

    Raises:
        ValueError: the strategy accumulates by itself, over windows of its own.
    """
    if trainer.strategy.handles_gradient_accumulation and trainer.accumulate_grad_batches > 1:
        raise ValueError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} with {type(trainer.strategy).__name__}, which "
            "keeps the gradients to itself: their sum cannot be divided by the label tokens of the window. Set "
            "accumulate_grad_batches=1 and larger batches, use FSDP, or train with littrainer.Trainer and deepspeed=."
        )


def make_optimizer(module: TransformersModule) -> Any:
    """The optimizer that a module was given, or that its arguments name."""
    given = module.given_optimizers[0]
    if given is not None:
        return given
    chosen = module.optimizer_cls_and_kwargs or optimizer_class_and_keywords(module.args, module.model)
    optimizer = build_optimizer(module.model, module.optimizer_groups(), *chosen)
    if updates_during_backward(optimizer):
        raise ValueError(
            f"optim={module.args.optim!r} updates the weights in a backward pass of its own, which a lightning.Trainer "
            "does not call. Train with littrainer.Trainer, or choose another optim."
        )
    return optimizer


def make_schedule(module: TransformersModule, optimizer: Any, num_training_steps: float | None) -> Any:
    """The schedule that a module was given, or that its arguments name.

    Parameters:
        num_training_steps: optimizer steps of the whole training; None, infinity or -1 where nobody knows.

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
            scheduler_specific_kwargs=options,  # type: ignore[arg-type]
        )
    except ValueError as error:
        if steps is None and "num_training_steps" in str(error):
            name = SchedulerType(args.lr_scheduler_type).value
            raise ValueError(f"lr_scheduler_type={name!r} ends with the training. {UNKNOWN_LENGTH}") from error
        raise


def for_lightning(module: TransformersModule, optimizer: Any, schedule: Any) -> dict[str, Any]:
    """Optimizer and schedule as `configure_optimizers` returns them; the schedule steps with the optimizer.

    One that follows a metric steps once in an epoch, with that metric of the validation.
    """
    if not steps_with_metric(schedule):
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
    following = {"interval": "epoch", "monitor": monitored_name(module.args.metric_for_best_model)}
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "reduce_on_plateau": True, **following}}
