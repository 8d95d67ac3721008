"""What is done when the control asks for it: log, evaluate, save; and which evaluation is the best so far."""

from __future__ import annotations

import logging
import numbers
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from littrainer.arguments.choices import SaveStrategy
from littrainer.checkpoint.async_save import WRITING_METHODS, BackgroundSaves
from littrainer.checkpoint.checksums import note_changes
from littrainer.checkpoint.remote import begin_uploads
from littrainer.training.batch_size_search import ran_out_of_memory
from littrainer.training.loss import RunningLoss, mean_over_processes
from littrainer.training.overrides import own_methods

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.state import TrainerState


def logs_since_last(
    loss: RunningLoss, running_sum: torch.Tensor, step: int, grad_norm: Any, learning_rate: float
) -> dict[str, float]:
    """Return what is logged of the steps since the last log, and sum from 0 again.

    Parameters:
        loss: the running loss of the training.
        running_sum: its sum since the last log; set to 0 in place.
        step: optimizer steps done.
        grad_norm: norm of the gradients at the last one; None if it is not known.
    """
    summed = mean_over_processes(running_sum)
    # Not zero_(): once a loss that is not a number has been logged, the running loss stays that way, as it does in
    # transformers.
    running_sum -= running_sum.clone()
    logs: dict[str, float] = {"loss": summed / (step - loss.step_of_last_log)}
    if grad_norm is not None:
        logs["grad_norm"] = grad_norm.item() if isinstance(grad_norm, torch.Tensor) else grad_norm
    logs["learning_rate"] = learning_rate
    loss.before_last_log += summed
    loss.step_of_last_log = step
    return logs


def background_saves(
    args: TrainingArguments, instance: object, when_saved: Callable[[str, TrainerState], None]
) -> BackgroundSaves | None:
    """What `async_save` asks for; None where it is not set, or a subclass writes checkpoints itself.

    Parameters:
        instance: the Trainer, whose overrides are looked for.
        when_saved: called with the folder of each checkpoint that has been written, and the state in it.
    """
    overridden = own_methods(instance, WRITING_METHODS) if args.async_save else []
    if overridden:
        logger.warning(
            "async_save: %s has its own %s, which has to find the model as it is at that step, so training waits for "
            "its checkpoints.",
            type(instance).__name__,
            ", ".join(overridden),
        )
    return BackgroundSaves(when_saved) if args.async_save and not overridden else None


def note_what_callbacks_did(checkpoint: str | None) -> None:
    """Let a checkpoint count as intact with what callbacks did to its files, when all have done it, and upload it."""
    if checkpoint is not None and Path(checkpoint).is_dir():
        note_changes(Path(checkpoint))
        begin_uploads(Path(checkpoint).parent)


def evaluate_in_training(trainer: Any, ignore_keys: Sequence[str] | None) -> dict[str, float]:
    """Evaluate as the training asks for it.

    Raises:
        RuntimeError: memory ran out, and only the training's batch size is searched for.
    """
    try:
        return trainer.evaluate(ignore_keys=ignore_keys)
    except RuntimeError as error:
        if trainer.args.auto_find_batch_size and ran_out_of_memory(error):
            # Training again with smaller micro-batches would not help the evaluation; this message must not look like
            # one that asks for it.
            raise RuntimeError(
                f"Memory ran out in the evaluation at optimizer step {trainer.state.global_step}, and "
                "auto_find_batch_size finds a size for training only: lower per_device_eval_batch_size, or set "
                "eval_accumulation_steps."
            ) from error
        raise


def remember_if_best(args: TrainingArguments, state: TrainerState, metrics: dict[str, float]) -> bool:
    """Note an evaluation that beats the best one so far, and say whether it does.

    Raises:
        KeyError: the evaluation has no metric of the name that `metric_for_best_model` gives.
        TypeError: that metric is no number.
    """
    if args.metric_for_best_model is None:
        return False
    name = args.metric_for_best_model
    name = name if name.startswith("eval_") else f"eval_{name}"
    if name not in metrics:
        raise KeyError(
            f"metric_for_best_model={args.metric_for_best_model!r} means {name!r}, which is not found in the "
            f"evaluation metrics. They are {', '.join(sorted(metrics))}: name one of these, or return {name!r} from "
            "compute_metrics."
        )
    value = metrics[name]
    if not _is_number(value):
        raise TypeError(
            f"metric_for_best_model={args.metric_for_best_model!r} has to be a number, and the evaluation at optimizer "
            f"step {state.global_step} gives {name}={value!r}. Return a number from compute_metrics, or name another "
            "metric."
        )
    if state.best_metric is None:
        state.best_metric = float("-inf") if args.greater_is_better else float("inf")
    if not (value > state.best_metric if args.greater_is_better else value < state.best_metric):
        return False
    state.best_metric = value
    if args.save_strategy != SaveStrategy.NO:
        state.best_global_step = state.global_step
    return True


def _is_number(value: Any) -> bool:
    if isinstance(value, numbers.Real):
        return True
    return getattr(value, "size", None) == 1 or (isinstance(value, torch.Tensor) and value.numel() == 1)
