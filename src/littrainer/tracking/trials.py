"""Trials of a hyperparameter search: each has a run of its own in every tracker."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.tracking.base import TrackerCallback

if TYPE_CHECKING:
    from littrainer.trainer import Trainer


def tell_trackers_of_trial(trainer: Trainer, trial: Any) -> None:
    """Let the trackers know the folder of the trial that begins, after which its runs are called.

    Parameters:
        trial: the trial, None for a training outside of a search.
    """
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TrackerCallback):
            callback.trial_folder = None if trial is None else Path(trainer._get_output_dir(trial=trial))
