"""Logs, evaluations and saves of a training, and its best evaluation."""

from __future__ import annotations

import logging
import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from littrainer.arguments.choices import SaveStrategy
from littrainer.distributed.collectives import get_world_size
from littrainer.loop.loss import RunningLoss, mean_over_processes
from littrainer.loop.out_of_memory import is_out_of_memory
from littrainer.loop.overrides import find_overrides

logger = logging.getLogger(__name__)

Metrics = dict[str, float]

# Methods whose overrides need the model as it is at the saved step.
WRITING_METHODS = (
    "_save_checkpoint",
    "save_model",
    "_save",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
)

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.state import TrainerControl, TrainerState


def collect_logs(
    loss: RunningLoss, running_sum: torch.Tensor, step: int, grad_norm: Any, learning_rate: float
) -> dict[str, float]:
    """Return the logs since the last log, and reset the running sum.

    Parameters:
        running_sum: sum of the losses since the last log; set to 0 in place.
    """
    total = loss.values.to_float(running_sum) if get_world_size() == 1 else mean_over_processes(running_sum)
    # Not zero_(): a running loss that is nan stays nan, as in transformers.
    running_sum -= running_sum.clone()
    logs: dict[str, float] = {"loss": total / (step - loss.step_of_last_log)}
    if grad_norm is not None:
        logs["grad_norm"] = loss.values.to_float(grad_norm) if isinstance(grad_norm, torch.Tensor) else grad_norm
    logs["learning_rate"] = learning_rate
    loss.before_last_log += total
    loss.step_of_last_log = step
    return logs


def can_save_in_background(args: TrainingArguments, instance: object) -> bool:
    """Return whether `async_save` applies: overrides of methods that write checkpoints disable it with a warning."""
    overridden = find_overrides(instance, *WRITING_METHODS) if args.async_save else []
    if overridden:
        logger.warning(
            "async_save: %s has its own %s, which needs the model as it is at the saved step, so training waits for "
            "its checkpoints.",
            type(instance).__name__,
            ", ".join(overridden),
        )
    return args.async_save and not overridden


def evaluate_in_training(args: TrainingArguments, step: int, evaluate: Callable[[], Metrics]) -> Metrics:
    """Evaluate; replace an out-of-memory error, so that `auto_find_batch_size` does not retry with a smaller batch."""
    try:
        return evaluate()
    except RuntimeError as error:
        if args.auto_find_batch_size and is_out_of_memory(error):
            # The message must not match `is_out_of_memory`, since smaller micro-batches would not help.
            raise RuntimeError(
                f"Memory ran out in the evaluation at optimizer step {step}, and "
                "auto_find_batch_size finds a size for training only: lower per_device_eval_batch_size, or set "
                "eval_accumulation_steps."
            ) from error
        raise


def update_best_metric(args: TrainingArguments, state: TrainerState, metrics: dict[str, float]) -> bool:
    """Record an evaluation, and return whether it is the best."""
    if args.metric_for_best_model is None:
        return False
    name = args.metric_for_best_model
    name = name if name.startswith("eval_") else f"eval_{name}"
    if name not in metrics:
        names = [metric for metric in sorted(metrics) if not metric.endswith(("epoch", "_runtime", "_per_second"))]
        advice = f"They are {', '.join(names)}: name one of these, or return {name!r} from compute_metrics."
        if not names:
            advice = "There are none: the eval_dataset seems to have no labels, which loss and compute_metrics need."
        raise KeyError(
            f"metric_for_best_model={args.metric_for_best_model!r} means {name!r}, which is not found in the "
            f"evaluation metrics. {advice}"
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


def update_save_flag(args: TrainingArguments, state: TrainerState, control: TrainerControl, is_new_best: bool) -> None:
    """Set the flag of a save after an evaluation, as `save_strategy="best"` and `eval_at_end` require."""
    if args.save_strategy == SaveStrategy.BEST:
        control.should_save = is_new_best
    elif is_new_best and args.eval_at_end and args.save_strategy != SaveStrategy.NO:
        is_last = control.should_training_stop or state.global_step >= state.max_steps
        control.should_save = control.should_save or is_last


def _is_number(value: Any) -> bool:
    if isinstance(value, numbers.Real):
        return True
    return getattr(value, "size", None) == 1 or (isinstance(value, torch.Tensor) and value.numel() == 1)
