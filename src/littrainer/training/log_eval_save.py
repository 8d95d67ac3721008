"""What is done when the control asks for it: log, evaluate, save; and which evaluation is the best so far."""

from __future__ import annotations

import functools
import logging
import numbers
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from littrainer.arguments.choices import SaveStrategy
from littrainer.checkpoint.async_save import WRITING_METHODS, BackgroundSaves
from littrainer.checkpoint.checksums import note_changes
from littrainer.checkpoint.distributed_save import leads
from littrainer.distributed.agreement import failing_together
from littrainer.training.batch_size_search import ran_out_of_memory
from littrainer.training.loss import mean_over_processes

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.state import TrainerState


def log_and_maybe_evaluate_and_save(
    trainer: Any,
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
    steps_since_logging = state.global_step - trainer.session.loss.step_of_last_log
    if trainer.control.should_log and steps_since_logging > 0:
        summed = mean_over_processes(running_loss)
        # Not zero_(): once a loss that is not a number has been logged, the running loss stays that way, as it does in
        # transformers.
        running_loss -= running_loss.clone()
        logs: dict[str, float] = {"loss": summed / steps_since_logging}
        if grad_norm is not None:
            logs["grad_norm"] = grad_norm.item() if isinstance(grad_norm, torch.Tensor) else grad_norm
        logs["learning_rate"] = trainer._get_learning_rate() if learning_rate is None else learning_rate
        trainer.session.loss.before_last_log += summed
        trainer.session.loss.step_of_last_log = state.global_step
        trainer.store_flos()
        trainer.log(logs, start_time)
    if trainer.control.should_evaluate and trainer.preemption.agreed is None:
        with trainer.preemption.breaking_off_evaluation(state):
            metrics = trainer._evaluate(trial, ignore_keys_for_eval)
            is_new_best = trainer._determine_best_metric(metrics=metrics, trial=trial)
            if args.save_strategy == SaveStrategy.BEST:
                trainer.control.should_save = is_new_best
    trainer.preemption.save_and_stop_if_asked(state, trainer.control)
    if not trainer.control.should_save:
        return
    if trainer.background_saves is not None and trainer.background_saves.can_copy(trainer._storage()):
        _begin_to_save(trainer, trainer.background_saves, trial)
        return
    trainer._save_checkpoint(model, trial)
    with failing_together("on_save of callbacks"):
        trainer.control = trainer.callback_handler.on_save(args, state, trainer.control)
    written, trainer._written_checkpoint = trainer._written_checkpoint, None
    _note_what_callbacks_did(written)


def background_saves(trainer: Any) -> BackgroundSaves | None:
    """What `async_save` asks for; None where it is not set, or a subclass writes checkpoints itself."""
    overridden = trainer._own_methods(*WRITING_METHODS) if trainer.args.async_save else []
    if overridden:
        logger.warning(
            "async_save: %s has its own %s, which has to find the model as it is at that step, so training waits for "
            "its checkpoints.",
            type(trainer).__name__,
            ", ".join(overridden),
        )
    if overridden or not trainer.args.async_save:
        return None
    return BackgroundSaves(functools.partial(_tell_of_background_save, trainer))


def _begin_to_save(trainer: Any, saves: BackgroundSaves, trial: Any) -> None:
    saves.wait()
    if trainer.hp_search_backend is None and trial is None:
        trainer.store_flos()
    saves.save(trainer._saved_training(trainer._get_output_dir(trial=trial)))
    trainer.control.should_save = False


def _tell_of_background_save(trainer: Any, folder: str, state: TrainerState) -> None:
    asked_meanwhile = trainer.control.should_save
    with failing_together(f"on_save of callbacks for {folder}"):
        trainer.control = trainer.callback_handler.on_save(trainer.args, state, trainer.control)
    trainer.control.should_save = trainer.control.should_save or asked_meanwhile
    _note_what_callbacks_did(folder if leads(trainer.args, Path(folder).parent) else None)
    if trainer.args.push_to_hub:
        trainer._push_from_checkpoint(folder)


def _note_what_callbacks_did(checkpoint: str | None) -> None:
    # Looked at when all of them have done it: the checkpoint counts as intact with what they did to its files.
    if checkpoint is not None and Path(checkpoint).is_dir():
        note_changes(Path(checkpoint))


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
