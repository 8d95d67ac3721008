"""Saves, evaluations and the end of training by time, and by files in the run's folder."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from littrainer.arguments.choices import IntervalStrategy, SaveStrategy
from littrainer.loop.step_policy import StepPolicy

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.state import TrainerControl, TrainerState
    from littrainer.distributed.collectives import SynchronizedFlags

logger = logging.getLogger(__name__)

FILE_CHECK_INTERVAL_S = 1.0
# File in the run's folder -> its effect.
REQUEST_FILES = {"SAVE": "saves", "STOP": "saves and stops"}


class Clock(StepPolicy):
    """Policy that sets control flags by `save_minutes`, `eval_minutes`, `max_minutes` and the files SAVE and STOP.

    Parameters:
        run_dir: folder of the files, which are deleted when they take effect.
        ignores_present_files: delete files that are there already and ignore them, since an earlier training left them.
        flags: exchange of control flags between processes; None with a single process.

    Attributes:
        ended_training: whether `max_minutes` has ended the training.
    """

    def __init__(
        self,
        args: TrainingArguments,
        run_dir: str,
        began: float,
        ignores_present_files: bool,
        flags: SynchronizedFlags | None = None,
    ):
        minutes = {"should_save": args.save_minutes, "should_evaluate": args.eval_minutes}
        self._args, self._run_dir, self._flags = args, Path(run_dir), flags
        self._seconds = {flag: 60 * number for flag, number in minutes.items() if number is not None}
        now = time.monotonic()
        self._due = {flag: now + seconds for flag, seconds in self._seconds.items()}
        self._end = math.inf if args.max_minutes is None else began + 60 * args.max_minutes
        self._next_file_check = self.next_step_end = now
        self.ended_training = False
        self._undeletable: set[Path] = set()
        for path in self._pop_request_files() if ignores_present_files else ():
            logger.warning("%s was there before this training began and is ignored: training continues.", path)

    def on_step_end(self, state: TrainerState, control: TrainerControl, is_epoch_end: bool) -> None:
        step, now = state.global_step, time.monotonic()
        for flag, due in self._due.items():
            setattr(control, flag, getattr(control, flag) or now >= due)
        if now >= self._end and not self.ended_training:
            self.ended_training = control.should_training_stop = True
            # As at `max_steps`, the last step saves and evaluates; an evaluation by epoch runs at the end of the epoch.
            control.should_save = control.should_save or self._args.save_strategy != SaveStrategy.NO
            control.should_evaluate = control.should_evaluate or self._args.eval_strategy == IntervalStrategy.STEPS
            logger.warning("max_minutes=%g: training ends at optimizer step %d.", self._args.max_minutes, step)
        if now >= self._next_file_check:
            self._next_file_check = now + FILE_CHECK_INTERVAL_S
            for path in self._pop_request_files():
                logger.warning("%s: training %s at optimizer step %d.", path, REQUEST_FILES[path.name], step)
                control.should_save = True
                control.should_training_stop = control.should_training_stop or path.name == "STOP"
        self.next_step_end = min(self._next_file_check, self._end, *self._due.values())
        if self._flags is not None:
            self._flags.decided_here.update(name for name in self._flags.names if getattr(control, name))

    def _pop_request_files(self) -> list[Path]:
        present = {*filter(Path.is_file, map(self._run_dir.joinpath, REQUEST_FILES))}
        new = present - self._undeletable
        self._undeletable &= present
        for path in new:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self._undeletable.add(path)
                logger.warning("%s could not be deleted (%s): it takes effect only once.", path, error)
        return sorted(new)

    def restart_intervals(self, has_saved: bool, has_evaluated: bool) -> None:
        """Restart the minutes after any save or evaluation."""
        now = time.monotonic()
        for flag, is_done in (("should_save", has_saved), ("should_evaluate", has_evaluated)):
            if is_done and flag in self._due:
                self._due[flag] = now + self._seconds[flag]
