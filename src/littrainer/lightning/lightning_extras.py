"""The methods of `Trainer` that transformers' Trainer does not have.

`lr_find` is a learning rate range test, as Leslie Smith ("Cyclical learning rates", 2017) describes it.
"""

from __future__ import annotations

import gc
import importlib
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from tqdm.auto import tqdm

from littrainer.callbacks.base import TrainerCallback
from littrainer.callbacks.progress import shows_bars
from littrainer.data.limits import development_batches
from littrainer.data.loaders import first_dimension, has_length
from littrainer.distributed.layout import data_parallel_size
from littrainer.lightning.trial_steps import check_can_try, left_as_found, take_steps
from littrainer.search import searching
from littrainer.search.record import BestRun
from littrainer.training.batch_size_search import check_that_all_ran_out, empty_device_cache, ran_out_of_memory
from littrainer.training.loss import mean_over_processes
from littrainer.training.overrides import own_methods

logger = logging.getLogger(__name__)

# How learning rates rise, and how a batch size is looked for.
RISES, SEARCHES = ("exponential", "linear"), ("power", "binsearch")
# Share of the mean so far that stays in it with each further loss.
KEPT_OF_THE_MEAN = 0.98
# A slope is measured over one step to each side for so many steps of the test.
STEPS_FOR_ONE_OF_REACH = 20
# The second micro-batch of a step finds the gradients of the first in memory; further ones take no more.
MICRO_BATCHES_THAT_MATTER = 2


class LightningExtras:
    """Methods of a `Trainer` that come from Lightning and searches."""

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
            num_training: optimizer steps, each with another learning rate.
            mode: `exponential` or `linear`, how the rates rise.
            early_stop_threshold: times the lowest loss so far at which the test ends; None for never.

        Returns:
            the rates and losses, with `suggestion()` and `plot()`.

        Raises:
            ValueError: a parameter is wrong, or there is no training data.
            RuntimeError, NotImplementedError: the Trainer could not be left as it was.
        """
        threshold = early_stop_threshold
        _refuse(
            "lr_find",
            {
                "mode": (mode, mode in RISES, " or ".join(map(repr, RISES))),
                "min_lr": (min_lr, 0 < min_lr < max_lr < math.inf, f"a number above 0 and below max_lr={max_lr!r}"),
                "num_training": (num_training, num_training >= 1, "the number of learning rates to try"),
                "early_stop_threshold": (threshold, threshold is None or threshold > 1, "None, or a number above 1"),
            },
        )
        check_can_try(self, "lr_find")
        trial = development_batches(self)
        rates = _rates(min_lr, max_lr, min(num_training, trial) if trial else num_training, mode)
        rising = _RisingRate(self, rates, early_stop_threshold)
        try:
            with left_as_found(self):
                take_steps(self, len(rates), rising, self.args.gradient_accumulation_steps)
        finally:
            rising.bar.close()
        tried = len(rising.losses)
        if rising.explodes:
            logger.info("lr_find ended after %d of %d learning rates: the loss explodes.", tried, len(rates))
        return RangeTest(mode, rates[:tried], rising.losses)

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
            max_val: the largest size to try.

        Returns:
            the size, for `per_device_train_batch_size`.

        Raises:
            ValueError: a parameter is wrong, or there is no training data.
            RuntimeError, NotImplementedError: no size fits, or the Trainer could not be left as it was.
        """
        sizes = {"steps_per_trial": steps_per_trial, "init_val": init_val, "max_trials": max_trials, "max_val": max_val}
        _refuse(
            "scale_batch_size",
            {
                "mode": (mode, mode in SEARCHES, " or ".join(map(repr, SEARCHES))),
                **{name: (value, value >= 1, "a whole number from 1 up") for name, value in sizes.items()},
                "margin": (margin, 0 <= margin < 1, "the share to take off, from 0 up and below 1"),
            },
        )
        check_can_try(self, "scale_batch_size")
        if development_batches(self):
            logger.warning("scale_batch_size tries nothing with fast_dev_run: it keeps %d.", self._train_batch_size)
            return self._train_batch_size
        accumulation = min(self.args.gradient_accumulation_steps, MICRO_BATCHES_THAT_MATTER)
        largest = min(max_val, _samples_for_one_process(self.train_dataset, self.args))
        fits, fails, size = 0, largest + 1, min(init_val, largest)
        for _ in range(max_trials):
            if _has_memory_for(self, size, steps_per_trial, accumulation):
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

    def apply_best(self: Any, best: BestRun, hp_space: Callable[[Any], dict[str, Any]] | None = None) -> None:
        """Set the arguments to those of a search's best trial, so that `train()` repeats it.

        Parameters:
            best: what `hyperparameter_search` returned, or one of several.
            hp_space: the space that it was drawn from; by default the last search's.

        Raises:
            ValueError, TypeError: these hyperparameters are no arguments of this Trainer.
        """
        searching.apply_best(self, best, hp_space)


# ---- Learning rates --------------------------------------------------------------------------------------------------


class RangeTest:
    """The losses that a training has with one learning rate after the other, as `Trainer.lr_find` returns them.

    Parameters:
        mode: `exponential` or `linear`, how the rates rise.
        rates: the learning rates, one for each optimizer step.
        losses: the loss of each step, as a running mean that weighs later losses more.
    """

    def __init__(self, mode: str, rates: list[float], losses: list[float]):
        self.mode = mode
        self.results: dict[str, list[float]] = {"lr": rates, "loss": losses}

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """The learning rate at which the loss falls fastest from one rate to the next, to begin a training with.

        Parameters:
            skip_begin: first steps that are left out, in which the mean is made of few losses.
            skip_end: last ones that are left out.

        Returns:
            the rate; None, with a warning, if fewer than two steps are left to compare.
        """
        place = self._steepest(skip_begin, skip_end)
        return None if place is None else self.results["lr"][place]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Draw the loss over the learning rate.

        Parameters:
            suggest: mark the suggestion.
            show: show the figure in a window, or in a notebook.
            ax: matplotlib's axes to draw into; by default a new figure's.

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
        if ax is None:
            _, ax = pyplot.subplots()
        rates, losses = self.results["lr"], self.results["loss"]
        ax.plot(rates, losses)
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("learning rate")
        ax.set_ylabel("loss")
        place = self._steepest() if suggest else None
        if place is not None:
            ax.plot([rates[place]], [losses[place]], "o", color="red", label=f"suggestion: {rates[place]:.2e}")
            ax.legend()
        if show:
            pyplot.show()
        return ax.figure

    def _steepest(self, skip_begin: int = 10, skip_end: int = 1) -> int | None:
        losses = self.results["loss"]
        places = [place for place in range(skip_begin, len(losses) - skip_end) if math.isfinite(losses[place])]
        if len(places) < 2:
            logger.warning(
                "No learning rate can be suggested: of %d steps that were tried %d are left to compare. Try more of "
                "them (num_training), or leave fewer out (skip_begin=%d, skip_end=%d).",
                len(losses),
                len(places),
                skip_begin,
                skip_end,
            )
            return None
        # The fall from one step to the next would be that of the noise in the first losses.
        reach = max(len(places) // STEPS_FOR_ONE_OF_REACH, 1)

        def slope(index: int) -> float:
            before, after = places[max(index - reach, 0)], places[min(index + reach, len(places) - 1)]
            return (losses[after] - losses[before]) / (after - before)

        return places[min(range(len(places)), key=slope)]


class _RisingRate(TrainerCallback):
    """Sets the learning rate of each optimizer step, and ends the training when all have been tried or losses explode.

    Parameters:
        trainer: the Trainer whose optimizer it is.
        rates: the learning rates.
        threshold: times the lowest mean loss so far at which the training ends; None for never.
    """

    def __init__(self, trainer: Any, rates: list[float], threshold: float | None):
        self.trainer = trainer
        self.rates = rates
        self.threshold = threshold
        self.losses: list[float] = []
        self.explodes = False
        self._mean = 0.0
        self._lowest = math.inf
        is_shown = shows_bars(trainer.args) and not trainer.args.disable_tqdm and trainer.is_world_process_zero()
        self.bar = tqdm(total=len(rates), desc="learning rates", disable=not is_shown)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        rate = self.rates[len(self.losses)]
        for group in self.trainer.optimizer.param_groups:
            # Some optimizers keep it as a tensor, which a captured graph reads.
            group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], torch.Tensor) else rate

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loss = mean_over_processes(self.trainer._tr_loss)
        self.trainer._tr_loss.zero_()
        self._mean = KEPT_OF_THE_MEAN * self._mean + (1 - KEPT_OF_THE_MEAN) * loss
        # Without the share of the zero that it began with.
        smoothed = self._mean / (1 - KEPT_OF_THE_MEAN ** (len(self.losses) + 1))
        self.losses.append(smoothed)
        self.bar.update()
        self.explodes = self.threshold is not None and not smoothed <= self.threshold * self._lowest
        self._lowest = min(self._lowest, smoothed)
        if self.explodes or len(self.losses) == len(self.rates):
            control.should_training_stop = True


def _rates(lowest: float, highest: float, number: int, mode: str) -> list[float]:
    shares = [place / max(number - 1, 1) for place in range(number)]
    if mode == "linear":
        return [lowest + share * (highest - lowest) for share in shares]
    return [lowest * (highest / lowest) ** share for share in shares]


def _refuse(method: str, parameters: dict[str, tuple[Any, bool, str]]) -> None:
    """Raise a ValueError for the first parameter, by name, that is not right: value, whether it is, what to give."""
    for name, (value, is_right, instead) in parameters.items():
        if not is_right:
            raise ValueError(f"{method}({name}={value!r}): give {instead}.")


# ---- Batch sizes -----------------------------------------------------------------------------------------------------


class _StepLimit(TrainerCallback):
    """Ends the trial after some optimizer steps, and sees that a loader of the script's own takes the size.

    Parameters:
        trainer: the Trainer that is tried out.
        size: samples in a micro-batch, as they are asked for.
        steps: optimizer steps.
    """

    def __init__(self, trainer: Any, size: int, steps: int):
        self.trainer, self.size, self.steps = trainer, size, steps
        self._is_unseen = bool(own_methods(trainer, ["get_train_dataloader"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_substep_end()
        control.should_training_stop = state.global_step >= self.steps

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        # Of the first micro-batch: the last one of the data may be smaller.
        found = first_dimension(self.trainer.lightning_module.micro_batch.inputs) if self._is_unseen else None
        self._is_unseen = False
        if found not in (None, self.size):
            raise ValueError(
                f"scale_batch_size asked for micro-batches of {self.size} samples, and get_train_dataloader() made "
                f"some of {found}: let it read self._train_batch_size."
            )


def _samples_for_one_process(dataset: Any, args: Any) -> int:
    if not has_length(dataset):
        return 2**62
    samples, processes = len(dataset), data_parallel_size(args)
    return max(samples // processes if args.dataloader_drop_last else math.ceil(samples / processes), 1)


def _has_memory_for(trainer: Any, size: int, steps: int, accumulation: int) -> bool:
    has_memory = True
    try:
        with left_as_found(trainer):
            # So the processes hear of what happens in each other's forward pass.
            trainer.args.auto_find_batch_size = True
            trainer.session.train_batch_size = size
            take_steps(trainer, steps, _StepLimit(trainer, size, steps), accumulation)
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        check_that_all_ran_out(trainer.args, error)
        has_memory = False
    # Outside of the except block, whose error holds the tensors that filled the memory.
    gc.collect()
    empty_device_cache()
    return has_memory
