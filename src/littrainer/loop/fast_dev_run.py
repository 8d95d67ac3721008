"""`lightning={"fast_dev_run": True}`: a trial of a script with a few batches, without checkpoints and trackers."""

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

TRIAL_ARGUMENTS: dict[str, Any] = {
    "logging_strategy": IntervalStrategy.STEPS,
    "logging_steps": 1,
    "eval_on_start": False,
    "eval_at_end": False,
    "eval_delay": 0,
    "save_strategy": SaveStrategy.NO,
    "enable_jit_checkpoint": False,
    "async_save": False,
}


class _DisableSaves(TrainerCallback):
    """The last callback, which lowers the flags of others."""

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        control.should_save = False
        # The end of the epoch evaluates.
        control.should_evaluate = False

    def _disable_save(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        control.should_save = False

    on_epoch_end = on_log = on_evaluate = _disable_save


def should_push_automatically(source: KeywordSource) -> bool:
    return bool(source.args.push_to_hub) and not count_development_batches(source)


@contextmanager
def apply_fast_dev_run(
    source: KeywordSource, callbacks: list[Any], has_eval_dataset: bool, resume_from_checkpoint: Any
) -> Iterator[None]:
    """Run a training as a trial if `fast_dev_run` is set.

    Parameters:
        resume_from_checkpoint: the argument of `train()`, which must be unset in a trial.
    """
    if not count_development_batches(source):
        yield
        return
    if resume_from_checkpoint:
        raise ValueError(
            f"lightning={{{DEVELOPMENT_RUN!r}: ...}} tries a training out from its beginning, and train() was given "
            f"resume_from_checkpoint={resume_from_checkpoint!r}: leave one of them out."
        )
    logger.warning(
        "fast_dev_run: a trial, with %d batch(es) of each kind. No checkpoint is written, and trackers are off.",
        count_development_batches(source),
    )
    args = source.args
    evaluates = has_eval_dataset or args.eval_strategy != IntervalStrategy.NO
    strategy = IntervalStrategy.EPOCH if evaluates else IntervalStrategy.NO
    changes = {**TRIAL_ARGUMENTS, "eval_strategy": strategy}
    originals = {name: getattr(args, name) for name in changes}
    trackers = {index: callback for index, callback in enumerate(callbacks) if isinstance(callback, TrackerCallback)}
    guard = _DisableSaves()
    callbacks[:] = [*(callback for callback in callbacks if not isinstance(callback, TrackerCallback)), guard]
    vars(args).update(changes)
    try:
        yield
    finally:
        vars(args).update(originals)
        callbacks[:] = [callback for callback in callbacks if callback is not guard]
        for index, tracker in trackers.items():
            callbacks.insert(index, tracker)
