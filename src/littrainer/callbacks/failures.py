"""Callbacks hear of a training that ends without `on_train_end`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)

ENDED_FOR_CALLBACKS = "_has_ended_for_callbacks"
"""Set on an error before which the callbacks heard on_train_end, as when a search prunes its trial."""


@contextlib.contextmanager
def callbacks_told_of_failure(trainer: Trainer) -> Iterator[None]:
    """While a training runs: when it ends with an error or an interruption, tell the callbacks, and pass it on.

    A callback that has to close what `on_train_begin` opened has a method `on_training_failed(args, state, error)`.
    An error in one is logged.
    """
    try:
        yield
    except BaseException as error:
        if not getattr(error, ENDED_FOR_CALLBACKS, False):
            _tell(trainer, error)
        raise


def _tell(trainer: Trainer, error: BaseException) -> None:
    for callback in list(trainer.callback_handler.callbacks):
        try:
            told = getattr(callback, "on_training_failed", None)
            if callable(told):
                told(trainer.args, trainer.state, error)
        except Exception:
            logger.warning("%s.on_training_failed failed:", type(callback).__name__, exc_info=True)
        except BaseException:
            # Who interrupts again does not want to wait, and is to see what ended the training.
            return
