"""`Trainer.lr_find`: a learning rate range test, as Leslie Smith ("Cyclical learning rates", 2017) has it."""

from __future__ import annotations

import importlib
import logging
import math
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from littrainer.callbacks.base import TrainerCallback
from littrainer.callbacks.progress import shows_bars
from littrainer.data.limits import development_batches
from littrainer.lightning.trial_steps import check_can_try, is_number, left_as_found, take_steps
from littrainer.training.accumulation_schedule import accumulation_schedule
from littrainer.training.loss import mean_over_processes

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)

MODES = ("exponential", "linear")
# Share of the mean so far that stays in it with each further loss.
KEPT_OF_THE_MEAN = 0.98
# A slope is measured over one step to each side for so many steps of the test.
STEPS_FOR_ONE_OF_REACH = 20


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
            the rate; None, with a warning, where fewer than two steps are left to compare.
        """
        place = self._steepest(skip_begin, skip_end)
        return None if place is None else self.results["lr"][place]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Draw the loss over the learning rate.

        Parameters:
            suggest: mark the suggestion.
            show: show the figure in a window, or in a notebook.
            ax: matplotlib's axes to draw into; by default those of a new figure.

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

    def __init__(self, trainer: Trainer, rates: list[float], threshold: float | None):
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


def lr_find(
    trainer: Trainer,
    min_lr: float,
    max_lr: float,
    num_training: int,
    mode: str,
    early_stop_threshold: float | None,
) -> RangeTest:
    """Train with rising learning rates, as `Trainer.lr_find` describes it."""
    _check(min_lr, max_lr, num_training, mode, early_stop_threshold)
    check_can_try(trainer, "lr_find")
    trial = development_batches(trainer)
    rates = _rates(min_lr, max_lr, min(num_training, trial) if trial else num_training, mode)
    schedule = accumulation_schedule(trainer)
    accumulation = trainer.args.gradient_accumulation_steps if schedule is None else schedule(0)
    rising = _RisingRate(trainer, rates, early_stop_threshold)
    try:
        with left_as_found(trainer):
            take_steps(trainer, len(rates), rising, accumulation)
    finally:
        rising.bar.close()
    tried = len(rising.losses)
    if rising.explodes:
        logger.info("lr_find ended after %d of %d learning rates: the loss explodes.", tried, len(rates))
    elif tried < len(rates):
        logger.warning(
            "lr_find tried %d of %d learning rates, since the data ended: its stream can be read only once, and a "
            "training after this goes on where it was left. Let __iter__ begin anew each time.",
            tried,
            len(rates),
        )
    return RangeTest(mode, rates[:tried], rising.losses)


def _rates(lowest: float, highest: float, number: int, mode: str) -> list[float]:
    shares = [place / max(number - 1, 1) for place in range(number)]
    if mode == "linear":
        return [lowest + share * (highest - lowest) for share in shares]
    return [lowest * (highest / lowest) ** share for share in shares]


def _check(min_lr: Any, max_lr: Any, num_training: Any, mode: Any, threshold: Any) -> None:
    if mode not in MODES:
        raise ValueError(f"lr_find(mode={mode!r}): give {' or '.join(map(repr, MODES))}.")
    if not is_number(min_lr) or not is_number(max_lr) or not 0 < min_lr < max_lr < math.inf:
        raise ValueError(
            f"lr_find(min_lr={min_lr!r}, max_lr={max_lr!r}): the learning rate rises from a number above 0 to a larger "
            "one."
        )
    if isinstance(num_training, bool) or not isinstance(num_training, int) or num_training < 1:
        raise ValueError(f"lr_find(num_training={num_training!r}): give the number of learning rates to try.")
    if threshold is not None and not (is_number(threshold) and threshold > 1):
        raise ValueError(
            f"lr_find(early_stop_threshold={threshold!r}): give how many times the lowest loss ends the test, above 1; "
            "None lets it go on."
        )
