"""What trial trainings of a check ask for, and what is noted in them: times, losses, the part that fails."""

from __future__ import annotations

import math
import sys
import time
import traceback
from typing import Any

from littrainer.arguments.choices import IntervalStrategy, SaveStrategy
from littrainer.callbacks.base import TrainerCallback
from littrainer.callbacks.state import TrainerState

# First optimizer steps, at which a trial evaluates and saves: twice, since the first time takes longer.
STEPS_WITH_EVENTS = 2
# What the arguments say for the length of a trial; what is done when is asked for by `TrialSteps`.
OF_A_TRIAL: dict[str, Any] = {
    **dict.fromkeys(("push_to_hub", "eval_on_start", "enable_jit_checkpoint", "logging_nan_inf_filter"), False),
    **dict.fromkeys(("save_total_limit", "max_minutes", "save_minutes", "hang_timeout"), None),
    **dict.fromkeys(("disable_tqdm", "skip_memory_metrics"), True),
}
# What they say for a training on chosen rows, of which nobody hears.
OF_STEPS_ALONE: dict[str, Any] = {
    "max_steps": -1,
    "logging_strategy": IntervalStrategy.STEPS,
    "logging_steps": 1,
    "eval_strategy": IntervalStrategy.NO,
    "save_strategy": SaveStrategy.NO,
    "load_best_model_at_end": False,
}
# Parts of a training, and functions whose call means that it has come to that part; the outermost one counts.
EVALUATION, SAVE, END, STEP = "evaluation", "save", "end of training", "optimizer step"
PARTS = {
    **dict.fromkeys(("_evaluate", "_determine_best_metric", "evaluate"), EVALUATION),
    **dict.fromkeys(("_save_checkpoint", "on_save", "note_what_callbacks_did"), SAVE),
    "_finalize_training": END,
}


class TrialSteps(TrainerCallback):
    """The last callback of a trial: asks for evaluations and saves at the first steps, takes times, and ends it.

    Parameters:
        seconds: how long it goes on after the first steps.
        last_step: the optimizer step after which it ends at the latest.
    """

    def __init__(self, evaluates: bool, saves: bool, seconds: float = 0.0, last_step: float = math.inf):
        self.evaluates, self.saves, self.seconds, self.last_step = evaluates, saves, seconds, last_step
        self.state: TrainerState | None = None
        self.began = self.last_event = time.perf_counter()
        self.step_ends: list[float] = []
        self.save_seconds = 0.0

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.state = state

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.last_event = time.perf_counter()
        self.step_ends.append(self.last_event)
        step, has_events = state.global_step, state.global_step <= STEPS_WITH_EVENTS
        control.should_log = control.should_log or has_events
        control.should_evaluate, control.should_save = has_events and self.evaluates, has_events and self.saves
        is_over = not has_events and self.last_event - self.step_ends[STEPS_WITH_EVENTS] >= self.seconds
        control.should_training_stop = control.should_training_stop or is_over or step >= self.last_step

    def on_log(self, *_: Any, **__: Any) -> None:
        self.last_event = time.perf_counter()

    on_evaluate = on_log

    def on_save(self, *_: Any, **__: Any) -> None:
        self.save_seconds = time.perf_counter() - self.last_event

    def on_epoch_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        control.should_evaluate = control.should_save = False


def calls_of(error: BaseException) -> list[str]:
    """Return the names of the functions that an error came through, the outermost first."""
    return [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]


def part_of(error: BaseException) -> str:
    """Return the part of a training that an error came from, by its traceback."""
    return next((PARTS[name] for name in calls_of(error) if name in PARTS), STEP)


def losses_by_step(state: TrainerState) -> dict[int, float]:
    """Return the losses that were logged, by optimizer step."""
    return {int(entry["step"]): entry["loss"] for entry in state.log_history if "loss" in entry}


def times_and_first(strategy: Any, interval: float, state: TrainerState) -> tuple[int, str]:
    """Return how often a training does what a strategy asks for, and when it first does; `no` leaves it to a script."""
    if strategy in (None, IntervalStrategy.NO):
        return 0, "at a call of evaluate()"
    if strategy == IntervalStrategy.STEPS:
        first = f"at optimizer step {min(interval, state.max_steps):,} of {state.max_steps:,}"
        return math.ceil(state.max_steps / max(interval, 1)), first
    # The length of a stream's epochs is not known.
    epochs = 1 if state.num_train_epochs == sys.maxsize else state.num_train_epochs
    steps = math.ceil(state.max_steps / epochs)
    return epochs, f"at the end of epoch 1 (optimizer step {steps:,} of {state.max_steps:,})"
