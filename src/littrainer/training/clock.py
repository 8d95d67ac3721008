"""What is asked for by the time that has passed, and by files that somebody puts into the run's folder."""

from __future__ import annotations

import logging
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from littrainer.arguments.choices import IntervalStrategy, SaveStrategy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.state import TrainerControl

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 1.0
# What a file in the run's folder asks for, by its name.
FILES = {"SAVE": "saves", "STOP": "saves and stops"}


class Clock:
    """Raises flags of the control as `save_minutes`, `eval_minutes` and `max_minutes` ask, and for SAVE and STOP.

    Parameters:
        run_dir: the folder in which the files are looked for, and taken away when they are answered.
        passes_over_files: those that are there already ask for nothing: they may be left over.

    Attributes:
        ended_training: whether `max_minutes` have passed.
        next_call: `time.monotonic()` from which on `raise_flags` has to be called.
    """

    def __init__(self, args: TrainingArguments, run_dir: str, began: float, passes_over_files: bool):
        minutes = {"should_save": args.save_minutes, "should_evaluate": args.eval_minutes}
        self._args, self._run_dir = args, Path(run_dir)
        self._seconds = {flag: 60 * number for flag, number in minutes.items() if number is not None}
        now = time.monotonic()
        self._due = {flag: now + seconds for flag, seconds in self._seconds.items()}
        self._end = math.inf if args.max_minutes is None else began + 60 * args.max_minutes
        self._next_look = self.next_call = now
        self.ended_training = False
        for path in self._files_taken_away() if passes_over_files else ():
            logger.warning("%s was there before this training began: deleted, training goes on.", path)

    def raise_flags(self, control: TrainerControl, step: int) -> None:
        """Raise what is due after an optimizer step; the first process does, and the others follow it."""
        now = time.monotonic()
        for flag, due in self._due.items():
            setattr(control, flag, getattr(control, flag) or now >= due)
        if now >= self._end and not self.ended_training:
            self.ended_training = control.should_training_stop = True
            # As at max_steps; what the epoch strategies ask for follows at the end of the epoch.
            control.should_save = control.should_save or self._args.save_strategy != SaveStrategy.NO
            control.should_evaluate = control.should_evaluate or self._args.eval_strategy == IntervalStrategy.STEPS
            logger.warning("max_minutes=%g: training ends at optimizer step %d.", self._args.max_minutes, step)
        if now >= self._next_look:
            self._next_look = now + SECONDS_BETWEEN_LOOKS
            for path in self._files_taken_away():
                logger.warning("%s: training %s at optimizer step %d.", path, FILES[path.name], step)
                control.should_save = True
                control.should_training_stop = control.should_training_stop or path.name == "STOP"
        self.next_call = min(self._next_look, self._end, *self._due.values())

    def _files_taken_away(self) -> list[Path]:
        found = [path for path in map(self._run_dir.joinpath, FILES) if path.is_file()]
        for path in found:
            with suppress(OSError):
                path.unlink()
        return found

    def begin_intervals(self, done: Mapping[str, bool]) -> None:
        """Count the minutes from now on to the next save or evaluation, after one for whatever reason has ended."""
        now = time.monotonic()
        self._due.update({flag: now + seconds for flag, seconds in self._seconds.items() if done.get(flag)})
