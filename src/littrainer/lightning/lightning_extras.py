"""The methods of `Trainer` that transformers' Trainer does not have.

`lr_find` is Leslie Smith's range test ("Cyclical learning rates", 2017).
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm.auto import tqdm

from littrainer.callbacks.base import TrainerCallback
from littrainer.callbacks.progress import should_show_bars
from littrainer.callbacks.trainer_context import TrainerContext
from littrainer.data.limits import count_development_batches
from littrainer.data.loaders import has_length
from littrainer.distributed.layout import data_parallel_size
from littrainer.lightning.trial_steps import check_can_try, restore_trainer_after, take_steps
from littrainer.loop.loss import mean_over_processes
from littrainer.loop.out_of_memory import has_memory_for
from littrainer.search import searching
from littrainer.search.record import BestRun

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)

MEAN_DECAY = 0.98
# A slope extends over 1/20 of all steps to both sides.
STEPS_PER_REACH = 20
# The second needs memory for gradients of the first.
MAX_MICRO_BATCHES = 2


class LightningExtras(TrainerContext):
    def lr_find(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
    ) -> RangeTest:
        """Take optimizer steps with rising learning rates, measure the losses and restore the Trainer.

        Parameters:
            min_lr, max_lr: the first and the last learning rate.
            num_training: optimizer steps, each with another learning rate.
            mode: `exponential` or `linear` increase.
            early_stop_threshold: the test ends at this multiple of the lowest loss; None for never.

        Returns:
            the rates and losses, with `suggestion()` and `plot()`.

        Raises:
            ValueError: a parameter is wrong, or there is no training data.
            RuntimeError, NotImplementedError: the Trainer could not be restored.
        """
        threshold = early_stop_threshold
        _check_parameters(
            "lr_find",
            mode=(mode, mode in ("exponential", "linear"), "'exponential' or 'linear'"),
            min_lr=(min_lr, 0 < min_lr < max_lr < math.inf, f"a number above 0 and below max_lr={max_lr!r}"),
            num_training=(num_training, num_training >= 1, "the number of learning rates to try"),
            early_stop_threshold=(threshold, threshold is None or threshold > 1, "None, or a number above 1"),
        )
        check_can_try(self, "lr_find")
        number = min(num_training, count_development_batches(self) or num_training)
        space = np.linspace if mode == "linear" else np.geomspace
        rising = _RisingRate(self, space(min_lr, max_lr, number).tolist(), threshold)
        with rising.bar, restore_trainer_after(self):
            take_steps(self, number, self.args.gradient_accumulation_steps, rising)
        steps = len(rising.losses)
        if rising.explodes:
            logger.info("lr_find ended after %d of %d learning rates: the loss explodes.", steps, number)
        return RangeTest(mode, rising.rates[:steps], rising.losses)

    def scale_batch_size(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int:
        """Find the largest micro-batch that fits into memory, and restore the Trainer.

        Parameters:
            mode: `power` doubles until memory runs out, `binsearch` then searches in between.
            steps_per_trial: optimizer steps with each size.
            init_val: the first size.
            max_trials: number of sizes to try.
            margin: safety margin, a fraction by which the result of `binsearch` is reduced.
            max_val: the largest size to try.

        Returns:
            the size, for `per_device_train_batch_size`.

        Raises:
            ValueError: a parameter is wrong, or there is no training data.
            RuntimeError, NotImplementedError: no size fits, or the Trainer could not be restored.
        """
        sizes = {"steps_per_trial": steps_per_trial, "init_val": init_val, "max_trials": max_trials, "max_val": max_val}
        _check_parameters(
            "scale_batch_size",
            mode=(mode, mode in ("power", "binsearch"), "'power' or 'binsearch'"),
            margin=(margin, 0 <= margin < 1, "the share to take off, from 0 up and below 1"),
            **{name: (value, value >= 1, "a whole number from 1 up") for name, value in sizes.items()},
        )
        check_can_try(self, "scale_batch_size")
        if count_development_batches(self):
            size: int = self.session.train_batch_size
            logger.warning("scale_batch_size tries nothing with fast_dev_run: it keeps %d.", size)
            return size
        accumulation = min(self.args.gradient_accumulation_steps, MAX_MICRO_BATCHES)
        largest = min(max_val, _count_samples_per_process(self.train_dataset, self.args))

        fits, fails, size = 0, largest + 1, min(init_val, largest)
        for _ in range(max_trials):
            try_size = functools.partial(_try_batch_size, self, size, steps_per_trial, accumulation)
            if has_memory_for(self.args, try_size):
                logger.info("Micro-batches of %d samples fit.", size)
                fits = size
            else:
                logger.info("Memory runs out with micro-batches of %d samples.", size)
                fails = size
            has_failed = fails <= largest
            if fails - fits <= 1 or (mode == "power" and fits and has_failed):
                break
            if has_failed:
                size = (fits + fails) // 2 if mode == "binsearch" and fits else max(fails // 2, 1)
            else:
                size = min(2 * fits, largest)
        if not fits:
            raise RuntimeError(
                f"scale_batch_size: memory runs out with micro-batches of {fails} samples too, the smallest that were "
                "tried. Use a smaller model or shorter samples, activation_checkpointing=True or bf16=True, or begin "
                "with a smaller init_val."
            )
        return max(math.floor(fits * (1 - margin)), 1) if mode == "binsearch" and fails <= largest else fits

    def apply_best(self, best: BestRun, hp_space: Callable[[Any], dict[str, Any]] | None = None) -> None:
        """Set the arguments of a search's best trial, so that `train()` repeats the trial.

        Parameters:
            best: the result of `hyperparameter_search`, or one of its results.
            hp_space: the search space; by default the last search's.

        Raises:
            ValueError, TypeError: a hyperparameter is no argument of this Trainer.
        """
        searching.apply_best(self, best, hp_space)


def _check_parameters(method: str, **parameters: tuple[Any, bool, str]) -> None:
    """Raise a ValueError for the first invalid parameter (value, is_valid, advice)."""
    for name, (value, is_valid, advice) in parameters.items():
        if not is_valid:
            raise ValueError(f"{method}({name}={value!r}): give {advice}.")


def _try_batch_size(trainer: TrainerContext, size: int, steps: int, accumulation: int) -> None:
    with restore_trainer_after(trainer):
        # Synchronizes out-of-memory errors.
        trainer.args.auto_find_batch_size = True
        take_steps(trainer, steps, accumulation, batch_size=size)


def _count_samples_per_process(dataset: Any, args: TrainingArguments) -> int:
    if not has_length(dataset):
        return sys.maxsize
    samples, processes = len(dataset), data_parallel_size(args)
    return max(samples // processes if args.dataloader_drop_last else math.ceil(samples / processes), 1)


class RangeTest:
    """The result of `Trainer.lr_find`: learning rates and their losses.

    Parameters:
        mode: `exponential` or `linear` increase of the rates.
        rates: the learning rate of each optimizer step.
        losses: the running mean of the losses at each step.
    """

    def __init__(self, mode: str, rates: list[float], losses: list[float]):
        self.mode = mode
        self.results: dict[str, list[float]] = {"lr": rates, "loss": losses}

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the rate at which the loss falls fastest, to begin a training with.

        Parameters:
            skip_begin: first steps to skip, whose mean has few losses.
            skip_end: last steps to skip.

        Returns:
            the rate; None, with a warning, if fewer than two steps remain.
        """
        losses = self.results["loss"]
        steps = [step for step in range(skip_begin, len(losses) - skip_end) if math.isfinite(losses[step])]
        if len(steps) < 2:
            logger.warning(
                "No learning rate can be suggested: of %d steps that were tried %d are left to compare. Try more "
                "steps (num_training), or skip fewer (skip_begin=%d, skip_end=%d).",
                len(losses),
                len(steps),
                skip_begin,
                skip_end,
            )
            return None
        # Adjacent steps differ by noise.
        reach = max(len(steps) // STEPS_PER_REACH, 1)

        def slope(index: int) -> float:
            before, after = steps[max(index - reach, 0)], steps[min(index + reach, len(steps) - 1)]
            return (losses[after] - losses[before]) / (after - before)

        return self.results["lr"][steps[min(range(len(steps)), key=slope)]]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Draw the loss over the learning rate.

        Parameters:
            suggest: mark the suggestion.
            show: show the figure in a window or notebook.
            ax: axes of matplotlib to draw into; by default of a new figure.

        Returns:
            matplotlib's figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            pyplot = importlib.import_module("matplotlib.pyplot")
        except ImportError as error:
            raise ImportError(
                "The plot of a learning rate range test needs matplotlib: pip install matplotlib. The numbers are in "
                "`results`."
            ) from error
        ax = pyplot.subplots()[1] if ax is None else ax
        rates, losses = self.results["lr"], self.results["loss"]
        ax.plot(rates, losses)
        ax.set(xlabel="learning rate", ylabel="loss", xscale="log" if self.mode == "exponential" else "linear")
        best = self.suggestion() if suggest else None
        if best is not None:
            ax.plot([best], [losses[rates.index(best)]], "o", color="red", label=f"suggestion: {best:.2e}")
            ax.legend()
        if show:
            pyplot.show()
        return ax.figure


class _RisingRate(TrainerCallback):
    """A callback that sets the learning rates, and stops if losses explode."""

    def __init__(self, trainer: TrainerContext, rates: list[float], threshold: float | None):
        self.trainer = trainer
        self.rates = rates
        self.threshold = threshold
        self.losses: list[float] = []
        self.explodes = False
        self._mean = 0.0
        is_shown = should_show_bars(trainer.args) and not trainer.args.disable_tqdm and trainer.is_world_process_zero()
        self.bar = tqdm(total=len(rates), desc="learning rates", disable=not is_shown)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        rate = self.rates[len(self.losses)]
        for group in self.trainer.optimizer.param_groups:
            # Captured graphs read a tensor.
            group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], torch.Tensor) else rate

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loss = mean_over_processes(self.trainer.session.loss.since_last_log)
        self.trainer.session.loss.since_last_log.zero_()
        self._mean = MEAN_DECAY * self._mean + (1 - MEAN_DECAY) * loss
        # Corrects the bias of the initial zero.
        smoothed = self._mean / (1 - MEAN_DECAY ** (len(self.losses) + 1))
        # Also true for nan.
        lowest = min(self.losses, default=math.inf)
        self.explodes = self.threshold is not None and not smoothed <= self.threshold * lowest
        self.losses.append(smoothed)
        self.bar.update()
        control.should_training_stop = self.explodes
