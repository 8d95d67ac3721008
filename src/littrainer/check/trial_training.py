"""What trial trainings of a check ask for, and what is noted in them: times, losses, the part that fails."""

from __future__ import annotations

import math
import time
import traceback
from typing import TYPE_CHECKING, Any

from littrainer.arguments.choices import IntervalStrategy, SaveStrategy
from littrainer.callbacks.base import TrainerCallback

if TYPE_CHECKING:
    from littrainer.callbacks.state import TrainerControl, TrainerState

# Optimizer steps at which a trial evaluates and saves: a second time, since the first one takes longer.
STEPS_WITH_EVENTS = 2
# What the arguments say for the length of a trial; the times at which it saves are asked for by `TrialSteps`.
ARGUMENTS_OF_A_TRIAL: dict[str, Any] = {
    "push_to_hub": False,
    "eval_on_start": False,
    "disable_tqdm": True,
    "save_total_limit": None,
    "max_minutes": None,
    "save_minutes": None,
    "enable_jit_checkpoint": False,
    "logging_nan_inf_filter": False,
    "skip_memory_metrics": True,
}
# What they say for a training on chosen rows, of which nobody hears.
ARGUMENTS_OF_STEPS_ALONE: dict[str, Any] = {
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
    "_evaluate": EVALUATION,
    "_determine_best_metric": EVALUATION,
    "evaluate": EVALUATION,
    "_save_checkpoint": SAVE,
    "on_save": SAVE,
    "note_what_callbacks_did": SAVE,
    "_finalize_training": END,
}


class TrialSteps(TrainerCallback):
    """The last of the callbacks of a trial: asks for evaluations and saves, takes times, and ends it.

    Parameters:
        evaluates, saves: whether the first steps do.
        seconds: how long it goes on after the steps with events.
        last_step: the optimizer step after which it ends at the latest.
    """

    def __init__(self, evaluates: bool, saves: bool, seconds: float = 0.0, last_step: float = math.inf):
        self.evaluates, self.saves = evaluates, saves
        self.last_step, self.seconds = last_step, seconds
        self.state: TrainerState | None = None
        self.began, self.first_step_began = time.perf_counter(), 0.0
        self.step_ends: list[float] = []
        # By step, the time at which the last event of the kind before the save, and the save itself, was over.
        self.before_save: dict[int, float] = {}
        self.save_seconds: dict[int, float] = {}

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.state = state

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.first_step_began = self.first_step_began or time.perf_counter()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        step, now = state.global_step, time.perf_counter()
        self.step_ends.append(now)
        has_events = step <= STEPS_WITH_EVENTS
        control.should_log = control.should_log or has_events
        control.should_evaluate, control.should_save = has_events and self.evaluates, has_events and self.saves
        self.before_save[step] = now
        is_over = step > STEPS_WITH_EVENTS and now - self.step_ends[STEPS_WITH_EVENTS] >= self.seconds
        if step >= self.last_step or is_over:
            control.should_training_stop = True

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.before_save[state.global_step] = time.perf_counter()

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.before_save[state.global_step] = time.perf_counter()

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        step = state.global_step
        self.save_seconds[step] = time.perf_counter() - self.before_save.get(step, math.nan)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        control.should_evaluate = control.should_save = False

    @property
    def seconds_to_start(self) -> float:
        """What lies before the first step: Lightning's set-up, and the start of the loader's processes."""
        return max(self.first_step_began - self.began, 0.0)

    @property
    def seconds_per_step(self) -> float | None:
        """Mean time of the steps without events; None if there were too few."""
        plain = self.step_ends[STEPS_WITH_EVENTS:]
        return (plain[-1] - plain[0]) / (len(plain) - 1) if len(plain) > 1 else None


def part_of(error: BaseException) -> str:
    """Return the part of a training that an error came from, by its traceback."""
    names = (frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((PARTS[name] for name in names if name in PARTS), STEP)


def losses_by_step(state: TrainerState) -> dict[int, float]:
    """Return the losses that were logged."""
    return {int(entry["step"]): entry["loss"] for entry in state.log_history if "loss" in entry}


def times_of(strategy: Any, interval: float, state: TrainerState) -> int:
    """Return how often a training does what a strategy asks for; by steps the last step is among them."""
    if strategy == IntervalStrategy.STEPS:
        return math.ceil(state.max_steps / max(interval, 1))
    return 0 if strategy in (None, IntervalStrategy.NO) else state.num_train_epochs


def first_time(strategy: Any, interval: float, state: TrainerState | None) -> str:
    """Return when a training first does what a strategy asks for."""
    if state is None:
        return "before the first optimizer step"
    if strategy == IntervalStrategy.STEPS:
        return f"at optimizer step {min(interval, state.max_steps):,} of {state.max_steps:,}"
    per_epoch = math.ceil(state.max_steps / max(state.num_train_epochs, 1))
    return f"at the end of epoch 1 of {state.num_train_epochs} (optimizer step {per_epoch:,} of {state.max_steps:,})"
