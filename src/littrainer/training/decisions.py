"""What is done when the control asks for it: log, evaluate, save; and which evaluation is the best so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from littrainer.arguments.choices import SaveStrategy

if TYPE_CHECKING:
    from littrainer.trainer import Trainer


def log_and_maybe_evaluate_and_save(
    trainer: Trainer,
    running_loss: torch.Tensor,
    grad_norm: Any,
    model: Any,
    trial: Any,
    ignore_keys_for_eval: Sequence[str] | None,
    start_time: float,
    learning_rate: float | None,
) -> None:
    """Do what the control asks for after a step or an epoch: log, then evaluate, then save."""
    args, state = trainer.args, trainer.state
    steps_since_logging = state.global_step - trainer._globalstep_last_logged
    if trainer.control.should_log and steps_since_logging > 0:
        summed = running_loss.item()
        # Not zero_(): once a loss that is not a number has been logged, the running loss stays that way, as it does in
        # transformers.
        running_loss -= running_loss.clone()
        logs: dict[str, float] = {"loss": summed / steps_since_logging}
        if grad_norm is not None:
            logs["grad_norm"] = grad_norm.item() if isinstance(grad_norm, torch.Tensor) else grad_norm
        logs["learning_rate"] = trainer._get_learning_rate() if learning_rate is None else learning_rate
        trainer._total_loss_scalar += summed
        trainer._globalstep_last_logged = state.global_step
        trainer.store_flos()
        trainer.log(logs, start_time)
    if trainer.control.should_evaluate:
        metrics = trainer._evaluate(trial, ignore_keys_for_eval)
        is_new_best = trainer._determine_best_metric(metrics=metrics, trial=trial)
        if args.save_strategy == SaveStrategy.BEST:
            trainer.control.should_save = is_new_best
    if trainer.control.should_save:
        trainer._save_checkpoint(model, trial)
        trainer.control = trainer.callback_handler.on_save(args, state, trainer.control)


def remember_if_best(trainer: Trainer, metrics: dict[str, float]) -> bool:
    """Note an evaluation that beats the best one so far, and say whether it does.

    Raises:
        KeyError: the evaluation has no metric of the name that `metric_for_best_model` gives.
    """
    args, state = trainer.args, trainer.state
    if args.metric_for_best_model is None:
        return False
    name = args.metric_for_best_model
    name = name if name.startswith("eval_") else f"eval_{name}"
    if name not in metrics:
        raise KeyError(
            f"metric_for_best_model={args.metric_for_best_model!r} means {name!r}, which the evaluation does not give; "
            f"it gives {', '.join(sorted(metrics))}. Name one of these, or return {name!r} from compute_metrics."
        )
    value = metrics[name]
    if state.best_metric is None:
        state.best_metric = float("-inf") if args.greater_is_better else float("inf")
    if not (value > state.best_metric if args.greater_is_better else value < state.best_metric):
        return False
    state.best_metric = value
    if args.save_strategy != SaveStrategy.NO:
        state.best_global_step = state.global_step
    return True
