"""The preparation of a module's model and schedule."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from littrainer.arguments.choices import SchedulerType
from littrainer.arguments.sharding import get_sharding_plan
from littrainer.arguments.training_arguments import TrainingArguments
from littrainer.loop.loss import make_label_smoother
from littrainer.loop.loss_normalization import UNKNOWN, LossReduction
from littrainer.model.facts import read_model_facts
from littrainer.optim.schedules import get_scheduler
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.runtime.notes import add_note, kind_of
from littrainer.strategies.model_wrapping import AUTOCAST_DTYPES

UNKNOWN_LENGTH = (
    "The number of steps is unknown: the loader has no length, or training has no end. Give "
    "lightning.Trainer(max_steps=...), or choose lr_scheduler_type='constant'."
)


def get_model_inputs(batch: Any) -> dict[str, Any]:
    """Return a batch as a dict; raise a TypeError if it is no mapping."""
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"TransformersModule was handed {kind_of(batch)} as a batch, and calls its model with the batch's entries "
            "as keywords: let the loader give dicts such as {'input_ids': ..., 'labels': ...}, for instance with "
            "DataLoader(..., collate_fn=littrainer.default_data_collator), or make it such a dict in the module's "
            "on_after_batch_transfer."
        )
    return dict(batch)


def note_unstacked_inputs(error: BaseException, inputs: Mapping[str, Any]) -> None:
    """Add a note about lists in a batch, as a DataLoader collates rows of a `datasets.Dataset`."""
    names = [name for name, value in inputs.items() if isinstance(value, list)]
    if names:
        add_note(
            error,
            f"{', '.join(map(repr, names))} of the batch is a list and no tensor: give the DataLoader "
            "dataset.with_format('torch'), or lightning.Trainer a TrainerDataModule(dataset).",
        )


class ModuleLossSettings:
    loss_is_scaled_for_ga: bool | None = None
    current_gradient_accumulation_steps = 1
    _loss_reduction: LossReduction = UNKNOWN
    _needs_logits = _has_chunked_loss = False

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        compute_loss_func: Callable[..., Any] | None,
        tensor_parallel_size: int,
    ):
        facts = read_model_facts(model)
        # The world size is set later.
        self.args = SimpleNamespace(
            world_size=1,
            average_tokens_across_devices=args.average_tokens_across_devices,
            loss_normalization=args.loss_normalization,
            chunked_loss=False,
        )
        self.compute_loss_func = compute_loss_func
        self.label_smoother = make_label_smoother(model, args.label_smoothing_factor)
        self.model_accepts_loss_kwargs = facts.accepts_loss_kwargs
        self.label_names = facts.label_names if args.label_names is None else args.label_names
        self.can_return_loss = facts.can_return_loss
        self.tensor_parallel_size = tensor_parallel_size
        self.shifts_labels = self._loss_shifts_labels = facts.shifts_labels

    def _get_batch_copies(self) -> int:
        return self.tensor_parallel_size


def set_training_mode(model: nn.Module, is_root: bool = True) -> None:
    """Put a model, and models of transformers within it, into training mode.

    `from_pretrained` returns evaluation mode. Other submodules keep their mode.
    """
    is_pretrained = is_a(model, "model of transformers")
    if not model.training and (is_root or is_pretrained):
        model.train()
    elif not is_pretrained:
        for child in model.children():
            set_training_mode(child, is_root=False)


def shard_model(model: nn.Module, strategy: Any, args: TrainingArguments) -> int:
    """Shard a model, and return the size of tensor parallelism."""
    if not isinstance(strategy, ModelParallelStrategy):
        return 1
    mesh: Any = strategy.device_mesh
    shards, tensor_parallel_size = mesh["data_parallel"].size(), mesh["tensor_parallel"].size()
    if tensor_parallel_size > 1:
        from littrainer.strategies.tensor_parallel import parallelize_by_plan

        parallelize_by_plan(model, mesh["tensor_parallel"])
    if shards > 1 and not is_a(model, "resharding module"):
        from littrainer.strategies.fsdp2 import shard

        plan: Any = get_sharding_plan(args)
        if plan is None:
            # As with `fsdp=True`.
            sharded_args: Any = copy.copy(args)
            sharded_args.fsdp, sharded_args.fsdp_config = True, args.fsdp_config or {"version": 2}
            plan = get_sharding_plan(sharded_args)
        forward_dtype = AUTOCAST_DTYPES.get(strategy.precision_plugin.precision)
        shard(model, plan, mesh["data_parallel"], strategy.root_device, forward_dtype)
    return tensor_parallel_size


# ---- The schedule ----------------------------------------------------------------------------------------------------


def count_training_steps(pl_trainer: pl.Trainer) -> float:
    """Count optimizer steps, also with a GradientAccumulationScheduler."""
    if pl_trainer.limit_train_batches == 0:
        return 0
    steps, epochs = pl_trainer.estimated_stepping_batches, pl_trainer.max_epochs or 0
    batches = pl_trainer.num_training_batches
    callbacks: list[Any] = pl_trainer.callbacks  # type: ignore[attr-defined]
    scheduler = next((callback for callback in callbacks if isinstance(callback, GradientAccumulationScheduler)), None)
    if scheduler is None or epochs < 1 or batches == math.inf:
        return steps
    steps = sum(math.ceil(batches / scheduler.get_accumulate_grad_batches(epoch)) for epoch in range(epochs))
    return steps if pl_trainer.max_steps < 0 else min(steps, pl_trainer.max_steps)


def make_schedule(args: TrainingArguments, optimizer: Any, num_training_steps: float | None) -> Any:
    """Return the schedule; raise a ValueError if it needs an unknown number of steps."""
    options: Any = args.lr_scheduler_kwargs
    steps = None
    if num_training_steps is not None and 0 <= num_training_steps < math.inf:
        steps = max(int(num_training_steps), 1)
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
