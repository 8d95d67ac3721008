"""`lightning={"fast_dev_run": True}`: a trial of a whole script, in a few batches, that leaves nothing behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from littrainer.arguments.choices import IntervalStrategy, SaveStrategy
from littrainer.callbacks.base import TrainerCallback
from littrainer.data.limits import DEVELOPMENT_RUN, KeywordSource, count_development_batches
from littrainer.tracking.base import TrackerCallback

if TYPE_CHECKING:
    from littrainer.callbacks.state import TrainerControl

logger = logging.getLogger(__name__)

# What the arguments say for the length of the training: each step is logged, one evaluation ends it, nothing is saved.
ARGUMENTS_OF_A_TRIAL: dict[str, Any] = {
    "logging_strategy": IntervalStrategy.STEPS,
    "logging_steps": 1,
    "eval_on_start": False,
    "eval_delay": 0,
    "save_strategy": SaveStrategy.NO,
    "enable_jit_checkpoint": False,
    "async_save": False,
}


class _SavesNothing(TrainerCallback):
    """The last of the callbacks: it takes back what others have asked for."""

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        control.should_save = False
        # One at the end of the epoch is enough.
        control.should_evaluate = False

    def _leave_out(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        control.should_save = False

    on_epoch_end = on_log = on_evaluate = _leave_out


def should_push_automatically(source: KeywordSource) -> bool:
    """Return whether the model is pushed to the Hub without a call by the script; in a trial it is not."""
    return bool(source.args.push_to_hub) and not count_development_batches(source)


def select_trackers(source: KeywordSource) -> Any:
    """What `report_to` names, and nothing in a trial."""
    return "none" if count_development_batches(source) else source.args.report_to


@contextmanager
def apply_fast_dev_run(trainer: Any, resume_from_checkpoint: Any) -> Iterator[None]:
    """While the block runs a training is a trial, where `fast_dev_run` asks for one; else nothing is changed.

    Parameters:
        resume_from_checkpoint: the argument of `train()`, which has to be unset.
    """
    if not count_development_batches(trainer):
        yield
        return
    if resume_from_checkpoint:
        raise ValueError(
            f"lightning={{{DEVELOPMENT_RUN!r}: ...}} tries a training out from its beginning, and train() was given "
            f"resume_from_checkpoint={resume_from_checkpoint!r}: leave one of them out."
        )
    logger.warning(
        "fast_dev_run: a trial, with %d batch(es) of each kind. No checkpoint is written, and no tracker hears of it.",
        count_development_batches(trainer),
    )
    args, callbacks = trainer.args, trainer.callback_handler.callbacks
    evaluates = trainer.eval_dataset is not None or args.eval_strategy != IntervalStrategy.NO
    strategy = IntervalStrategy.EPOCH if evaluates else IntervalStrategy.NO
    changed = {**ARGUMENTS_OF_A_TRIAL, "eval_strategy": strategy}
    kept = {name: getattr(args, name) for name in changed}
    silent = [(place, one) for place, one in enumerate(callbacks) if isinstance(one, TrackerCallback)]
    guard = _SavesNothing()
    callbacks[:] = [*(one for one in callbacks if not isinstance(one, TrackerCallback)), guard]
    vars(args).update(changed)
    try:
        yield
    finally:
        vars(args).update(kept)
        # Others may have been added or removed.
        callbacks[:] = [one for one in callbacks if one is not guard]
        for place, one in silent:
            callbacks.insert(place, one)
