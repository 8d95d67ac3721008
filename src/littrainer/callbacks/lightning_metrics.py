"""Metrics, ends of validations and indices of predictions of a Trainer, for Lightning's callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from littrainer.callbacks.lightning_callbacks import is_lightning_class

if TYPE_CHECKING:
    import lightning.pytorch as pl

# What progress bars of Lightning show besides the rate; they add the name of each value.
SHOWN_IN_BARS = ("loss", "learning_rate", "eval_loss")

# Names that Lightning's callbacks keep for its own counts of epochs and optimizer steps.
COUNTS = ("epoch", "step")


def publish(pl_trainer: pl.Trainer, logs: dict[str, Any]) -> None:
    """Put the numbers among logged values into `callback_metrics`, `logged_metrics` and `progress_bar_metrics`.

    Lightning's own callbacks add to these dictionaries in the same way. `LightningModule.log` is not called, as it may
    only be within some hooks, while a Trainer logs at any time.
    """
    # In double precision, so that a callback compares what the Trainer's history shows.
    numbers = {name: float(value) for name, value in logs.items() if is_number(value) and name not in COUNTS}
    values = {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
    pl_trainer.callback_metrics.update(values)
    pl_trainer.logged_metrics.update(values)
    pl_trainer.progress_bar_metrics.update({name: numbers[name] for name in SHOWN_IN_BARS if name in numbers})


def is_number(value: Any) -> bool:
    """Whether a logged value is one number, also one of NumPy or torch."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, Real) and not isinstance(value, bool)


def set_batch_indices(pl_trainer: pl.Trainer, places: list[int] | None) -> None:
    """Tell writers the places of the batch that was predicted last.

    Lightning knows them for its own samplers only, and writers look where it would note them.

    Parameters:
        places: numbers of samples; None if they are not known.
    """
    loop, known = pl_trainer.predict_loop, places or []
    loop.current_batch_indices = known
    writers = [one for one in pl_trainer.callbacks if is_lightning_class(one, "BasePredictionWriter")]  # type: ignore[attr-defined]
    if any(writer.interval.on_epoch for writer in writers):
        loop.epoch_batch_indices[0].append(known)


class DeferredValidationEnd:
    """Holds `on_validation_end` back until the metrics are known that callbacks look for in it.

    Lightning's loop ends before metrics are computed, and a subclass may add metrics after that. Several
    datasets are one round: callbacks that monitor a metric hear of its end once, with the metrics of all datasets.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._end: Callable[[bool], None] | None = None

    @contextmanager
    def round(self, when_over: Callable[[], None] = lambda: None) -> Iterator[None]:
        """What is evaluated within it is one round, or part of the round around it.

        Parameters:
            when_over: called at the end of a round in which there was a validation inside fit.
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
        """A validation inside fit has run.

        Parameters:
            end: calls `on_validation_end` of the callbacks that monitor metrics (True), or of all others (False).
        """
        self._end = end

    def notify_previous_end(self) -> None:
        """Another validation of the round begins: callbacks that monitor no metric hear that the last one has ended."""
        end, self._end = self._end, None
        if end is not None:
            end(False)
