"""A Trainer's metrics, ends of validations and prediction indices, for Lightning's callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from littrainer.callbacks.lightning_callbacks import is_lightning_class

if TYPE_CHECKING:
    import lightning.pytorch as pl

PROGRESS_BAR_METRICS = ("loss", "learning_rate", "eval_loss")

# Counts of Lightning's callbacks.
COUNTS = ("epoch", "step")


def publish(pl_trainer: pl.Trainer, logs: dict[str, Any]) -> None:
    """Add logged numbers to `callback_metrics`, `logged_metrics` and `progress_bar_metrics`.

    `LightningModule.log` works in some hooks only, while a Trainer logs at any time.
    """
    # Double precision, as in the Trainer's history.
    numbers = {name: float(value) for name, value in logs.items() if is_number(value) and name not in COUNTS}
    values = {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
    pl_trainer.callback_metrics.update(values)
    pl_trainer.logged_metrics.update(values)
    pl_trainer.progress_bar_metrics.update({name: numbers[name] for name in PROGRESS_BAR_METRICS if name in numbers})


def is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, Real) and not isinstance(value, bool)


def set_batch_indices(pl_trainer: pl.Trainer, indices: list[int] | None) -> None:
    """Set the sample indices of the last predicted batch, which Lightning records for its own samplers only."""
    loop = pl_trainer.predict_loop
    loop.current_batch_indices = indices or []
    callbacks = pl_trainer.callbacks  # type: ignore[attr-defined]
    if any(
        callback.interval.on_epoch for callback in callbacks if is_lightning_class(callback, "BasePredictionWriter")
    ):
        loop.epoch_batch_indices[0].append(indices or [])


class DeferredValidationEnd:
    """Delayed `on_validation_end`, called after the metrics are computed.

    With several datasets, callbacks that monitor a metric are called once, after the last dataset.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._end: Callable[[bool], None] | None = None

    @contextmanager
    def merge_evaluations(self, when_over: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Treat the evaluations in the block as a single validation; nested blocks belong to the outermost.

        Parameters:
            when_over: called at the end if there was a validation inside fit.
        """
        self._depth += 1
        try:
            yield
        except BaseException:
            self._end = None
            raise
        finally:
            self._depth -= 1
        if not self._depth and self._end is not None:
            end, self._end = self._end, None
            end(False)
            end(True)
            when_over()

    def add(self, end: Callable[[bool], None]) -> None:
        """Record the end of a validation inside fit.

        Parameters:
            end: calls `on_validation_end` of callbacks that monitor metrics (True), or of all others (False).
        """
        self._end = end

    def notify_previous_end(self) -> None:
        """Call `on_validation_end` of callbacks without a metric, before the next dataset's validation."""
        end, self._end = self._end, None
        if end is not None:
            end(False)
