"""The methods of `Trainer` that transformers' Trainer does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from littrainer.lightning import batch_size_finder, learning_rate_finder
from littrainer.lightning.learning_rate_finder import RangeTest
from littrainer.search import applying
from littrainer.search.results import BestRun


class LightningExtras:
    """What Lightning and searches give a `Trainer` besides the documented methods; mixed into it."""

    def lr_find(
        self: Any,
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
    ) -> RangeTest:
        """Take optimizer steps with rising learning rates and watch the loss; the Trainer is left as it was.

        Parameters:
            min_lr, max_lr: the first and the last learning rate.
            num_training: optimizer steps, each with a learning rate of its own.
            mode: `exponential` or `linear`, how the rates rise.
            early_stop_threshold: times the lowest loss so far at which the test ends; None for never.

        Returns:
            the rates and losses, with `suggestion()` and `plot()`.

        Raises:
            ValueError: a parameter is wrong, or there is no training data.
            RuntimeError, NotImplementedError: the Trainer could not be left as it was.
        """
        return learning_rate_finder.lr_find(self, min_lr, max_lr, num_training, mode, early_stop_threshold)

    def scale_batch_size(
        self: Any,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int:
        """Find the largest micro-batch on a device that there is memory for; the Trainer is left as it was.

        Parameters:
            mode: `power` doubles until memory runs out, `binsearch` then looks in between.
            steps_per_trial: optimizer steps with each size.
            init_val: samples in the first micro-batches.
            max_trials: sizes to try.
            margin: share of what `binsearch` has found that is taken off again, for safety.
            max_val: the largest size to try, where the data has as many samples.

        Returns:
            the size, for `per_device_train_batch_size`.

        Raises:
            ValueError: a parameter is wrong, or there is no training data.
            RuntimeError, NotImplementedError: no size fits, or the Trainer could not be left as it was.
        """
        return batch_size_finder.scale_batch_size(self, mode, steps_per_trial, init_val, max_trials, margin, max_val)

    def apply_best(self: Any, best: BestRun, hp_space: Callable[[Any], dict[str, Any]] | None = None) -> None:
        """Set the arguments to those of a search's best trial, so that `train()` repeats it.

        Parameters:
            best: what `hyperparameter_search` returned, or one of several.
            hp_space: the space that it was drawn from; by default that of the last search.

        Raises:
            ValueError, TypeError: these hyperparameters are no arguments of this Trainer.
        """
        applying.apply_best(self, best, hp_space)
