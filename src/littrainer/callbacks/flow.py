"""`DefaultFlowCallback`: when to log, evaluate, save and stop, as the arguments say."""

from __future__ import annotations

from typing import Any

from littrainer.arguments.choices import IntervalStrategy, SaveStrategy
from littrainer.callbacks.base import TrainerCallback
from littrainer.callbacks.state import TrainerControl, TrainerState


class DefaultFlowCallback(TrainerCallback):
    """Sets the control's switches from the logging, evaluation and save strategies."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """Due intervals of the `steps` strategies; at the last step also what is still outstanding."""
        step = state.global_step
        is_last = step >= state.max_steps
        if args.logging_strategy == IntervalStrategy.STEPS and step % state.logging_steps == 0:
            control.should_log = True
        if args.logging_first_step and step == 1:
            control.should_log = True
        if (
            args.eval_strategy == IntervalStrategy.STEPS
            and step >= args.eval_delay
            and (is_last or step % state.eval_steps == 0)
        ):
            control.should_evaluate = True
        if args.save_strategy == SaveStrategy.STEPS and (
            is_last or (state.save_steps > 0 and step % state.save_steps == 0)
        ):
            control.should_save = True
        if is_last:
            control.should_training_stop = True
        return control

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """What the `epoch` strategies ask for."""
        if args.logging_strategy == IntervalStrategy.EPOCH:
            control.should_log = True
        if args.eval_strategy == IntervalStrategy.EPOCH and state.epoch >= args.eval_delay:
            control.should_evaluate = True
        if args.save_strategy == SaveStrategy.EPOCH:
            control.should_save = True
        return control
