"""`EarlyStoppingCallback`: stop when the watched metric no longer improves."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from littrainer.arguments.choices import IntervalStrategy
from littrainer.callbacks.base import TrainerCallback
from littrainer.callbacks.progress import write_on_terminal
from littrainer.callbacks.state import (
    PATIENCE_COUNTER,
    ExportableState,
    TrainerControl,
    TrainerState,
    describe_lost_patience,
)

logger = logging.getLogger(__name__)


class EarlyStoppingError(AssertionError, ValueError):
    """Missing argument of early stopping; transformers raises an AssertionError."""


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Callback that stops training when `metric_for_best_model` has not improved for a number of evaluations.

    Parameters:
        early_stopping_patience: evaluations without improvement after which training stops.
        early_stopping_threshold: minimum improvement over the best value.

    Examples:
        >>> from littrainer import EarlyStoppingCallback, Trainer, TrainingArguments
        >>> best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": False}
        >>> args = TrainingArguments("runs/first", eval_strategy="epoch", save_strategy="epoch", **best)
        >>> trainer = Trainer(model, args, train_dataset=train_dataset, eval_dataset=eval_dataset)
        >>> trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0):
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.early_stopping_patience_counter = 0

    def check_metric_value(self, args: Any, state: TrainerState, control: TrainerControl, metric_value: float) -> None:
        """Count an evaluation without improvement, or reset the counter.

        Parameters:
            args: training arguments with `greater_is_better`.
            state: state with the best value so far.
            control: not used.
            metric_value: value of this evaluation.
        """
        gain = None
        if state.best_metric is not None:
            gain = metric_value - state.best_metric if args.greater_is_better else state.best_metric - metric_value
        if gain is None or (gain > 0 and gain > (self.early_stopping_threshold or 0.0)):
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if args.metric_for_best_model is None:
            raise EarlyStoppingError("EarlyStoppingCallback requires metric_for_best_model, which it watches: set it.")
        if args.eval_strategy == IntervalStrategy.NO:
            raise EarlyStoppingError(
                "EarlyStoppingCallback requires IntervalStrategy of steps or epoch in eval_strategy."
            )
        if not args.load_best_model_at_end:
            logger.warning(
                "EarlyStoppingCallback without load_best_model_at_end=True: the model kept at the end is the last one, "
                "not the best one."
            )

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        name = args.metric_for_best_model
        name = name if name.startswith("eval_") else f"eval_{name}"
        value = (metrics or {}).get(name)
        if value is None:
            logger.warning(
                "Early stopping does nothing at an evaluation without %s, as this one with %s is.",
                name,
                sorted(metrics or {}),
            )
            return
        self.check_metric_value(args, state, control, value)
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True
            step = f"step {state.global_step} of {state.max_steps}"
            reason = describe_lost_patience(name, self.early_stopping_patience)
            write_on_terminal(args, state, f"Early stopping at {step}: {reason}.")

    def state(self) -> dict[str, Any]:
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter},
        }


def restore_patience(callbacks: Iterable[Any], saved_states: dict[str, Any]) -> None:
    """Restore the counters of early-stopping callbacks."""
    # Each save appends to the list of several callbacks of a class: read its end.
    remaining = {name: [*saved] if isinstance(saved, list) else [saved] for name, saved in saved_states.items()}
    for callback in reversed([*callbacks]):
        states = remaining.get(type(callback).__name__)
        attributes = states.pop().get("attributes", {}) if states else {}
        if hasattr(callback, PATIENCE_COUNTER) and PATIENCE_COUNTER in attributes:
            setattr(callback, PATIENCE_COUNTER, attributes[PATIENCE_COUNTER])
