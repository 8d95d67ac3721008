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
# What the arguments say for the length of a trial; `TrialSteps` asks for evaluations and saves.
OF_A_TRIAL: dict[str, Any] = {
    **dict.fromkeys(("push_to_hub", "eval_on_start", "enable_jit_checkpoint", "logging_nan_inf_filter"), False),
    **dict.fromkeys(("save_total_limit", "max_minutes", "save_minutes", "eval_minutes"), None),
    **dict.fromkeys(("disable_tqdm", "skip_memory_metrics"), True),
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
        seconds: how long it goes on after the first steps; a training to the end logs each step.
        last_step: the optimizer step after which it ends at the latest.
    """

    def __init__(self, evaluates: bool, saves: bool, seconds: float = 0.0, last_step: float = math.inf):
        self.evaluates, self.saves, self.seconds, self.last_step = evaluates, saves, seconds, last_step
        self.state: TrainerState | None = None
        self.began = self.last_event = time.perf_counter()
        self.step_ends: list[float] = []
        self.save_seconds = 0.0

    @property
    def losses(self) -> dict[int, float]:
        """The losses that were logged, by optimizer step."""
        entries = self.state.log_history if self.state is not None else []
        return {int(entry["step"]): entry["loss"] for entry in entries if "loss" in entry}

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.state, self.last_event = state, time.perf_counter()
        self.step_ends.append(self.last_event)
        step, has_events = state.global_step, state.global_step <= STEPS_WITH_EVENTS
        control.should_log = control.should_log or has_events or self.seconds == math.inf
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


def part_of(error: BaseException) -> str:
    """Return the part of a training that an error came from, by its traceback."""
    names = (frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((PARTS[name] for name in names if name in PARTS), STEP)


def times_and_first(part: str, args: Any, steps: TrialSteps) -> tuple[int, str]:
    """Return how often a training comes to a part by its strategies, and when first; `no` leaves it to the script."""
    state = steps.state
    if state is None or part in (STEP, END):
        return 1, "when all steps are done" if part == END else f"at optimizer step {len(steps.step_ends) + 1:,}"
    strategy, interval, minutes = args.eval_strategy, state.eval_steps, args.eval_minutes
    if part == SAVE and args.save_strategy != SaveStrategy.BEST:
        strategy, interval, minutes = args.save_strategy, state.save_steps, args.save_minutes
    if strategy in (None, IntervalStrategy.NO):
        return 0, f"after {minutes:g} minutes" if minutes else "at a call of evaluate()"
    if strategy == IntervalStrategy.STEPS:
        first = f"at optimizer step {min(interval, state.max_steps):,} of {state.max_steps:,}"
        return math.ceil(state.max_steps / max(interval, 1)), first
    # The length of a stream's epochs is not known.
    epochs = 1 if state.num_train_epochs == sys.maxsize else state.num_train_epochs
    steps_of_one = math.ceil(state.max_steps / epochs)
    return epochs, f"at the end of epoch 1 (optimizer step {steps_of_one:,} of {state.max_steps:,})"
