"""GreedyLR: a learning rate that rises while a metric improves and falls when it stops improving.

After "GreedyLR: A Novel Adaptive Learning Rate Scheduler" (arXiv:2512.14527).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from torch.optim import Optimizer

Evaluations: TypeAlias = int

BEST_AT_START = {"min": float("inf"), "max": float("-inf")}
THRESHOLD_MODES = ("rel", "abs")
# What a saved schedule holds; transformers reads and writes the same names.
CONDITIONS = ("mode", "factor", "patience", "threshold", "threshold_mode", "cooldown", "warmup", "min_lrs", "max_lrs")
FURTHER_CONDITIONS = ("eps", "verbose", "smooth", "window_size", "reset_start_original")
COUNTERS = ("num_bad_epochs", "num_good_epochs", "cooldown_counter", "warmup_counter", "last_epoch", "reset_start")
STATE_NAMES = (*CONDITIONS, *FURTHER_CONDITIONS, *COUNTERS, "best", "_last_lr", "_init_lrs")


class RollingMean:
    """The mean of the last values.

    Parameters:
        window_size: how many.
    """

    def __init__(self, window_size: int):
        self.window_size = window_size
        self.values: list[float] = []
        self.sum = 0.0

    def add(self, value: float) -> float:
        """Take one more value; the mean including it."""
        self.values.append(value)
        self.sum += value
        if len(self.values) > self.window_size:
            self.sum -= self.values.pop(0)
        return self.sum / len(self.values)

    def state_dict(self) -> dict[str, Any]:
        """Window, values and their running sum."""
        return {"window_size": self.window_size, "values": list(self.values), "sum": self.sum}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a saved mean stood."""
        self.window_size = state_dict["window_size"]
        self.values, self.sum = list(state_dict["values"]), state_dict["sum"]


class GreedyLR:
    """Divides the learning rate by `factor` when a metric keeps improving, and multiplies by it when it does not.

    Parameters:
        optimizer: the optimizer it drives.
        mode: `min` where a lower metric is better, `max` where a higher one is.
        factor: below 1.
        patience: evaluations in a row that have to agree before the learning rate changes.
        threshold: the least change that counts as an improvement.
        threshold_mode: `rel` reads the threshold as a share of the best value, `abs` as a difference.
        cooldown: evaluations that are ignored after a fall.
        warmup: evaluations that are ignored after a rise.
        min_lr, max_lr: bounds of the learning rate, for all parameter groups or one for each.
        eps: changes of the learning rate up to this size are not made.
        verbose: print each change.
        smooth: judge the rolling mean of the metric.
        window_size: evaluations in that mean.
        reset_start: falls at the lower bound after which the learning rate starts again from its first value.

    Raises:
        ValueError: a value that cannot be, or bounds that are not one for each parameter group.
        TypeError: `optimizer` is none.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: Literal["min", "max"] = "min",
        factor: float = 0.95,
        patience: Evaluations = 10,
        threshold: float = 1e-6,
        threshold_mode: Literal["rel", "abs"] = "abs",
        cooldown: Evaluations = 0,
        warmup: Evaluations = 0,
        min_lr: float | Sequence[float] = 1e-3,
        max_lr: float | Sequence[float] = 1.0,
        eps: float = 1e-8,
        verbose: bool = False,
        smooth: bool = False,
        window_size: Evaluations = 50,
        reset_start: Evaluations = 500,
    ):
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"GreedyLR drives a torch.optim.Optimizer, and was given a {type(optimizer).__name__}.")
        if factor >= 1.0:
            raise ValueError(f"GreedyLR's factor={factor} must be below 1.")
        if mode not in BEST_AT_START:
            raise ValueError(f"GreedyLR's mode={mode!r} must be one of {', '.join(BEST_AT_START)}.")
        if threshold_mode not in THRESHOLD_MODES:
            raise ValueError(
                f"GreedyLR's threshold_mode={threshold_mode!r} must be one of {', '.join(THRESHOLD_MODES)}."
            )
        self.optimizer = optimizer
        self.mode, self.factor, self.patience = mode, factor, patience
        self.threshold, self.threshold_mode = threshold, threshold_mode
        self.cooldown, self.warmup = cooldown, warmup
        self.min_lrs = self._one_for_each_group("min_lr", min_lr)
        self.max_lrs = self._one_for_each_group("max_lr", max_lr)
        self.eps, self.verbose = eps, verbose
        self.smooth, self.window_size = smooth, window_size
        self.reset_start = self.reset_start_original = reset_start
        self.last_epoch = 0
        self._init_lrs = self._current_rates()
        self._last_lr = self._current_rates()
        self._forget()

    def _one_for_each_group(self, name: str, bound: float | Sequence[float]) -> list[float]:
        groups = len(self.optimizer.param_groups)
        if not isinstance(bound, (list, tuple)):
            return [bound] * groups  # type: ignore[list-item]
        if len(bound) != groups:
            raise ValueError(f"GreedyLR's {name} has {len(bound)} values for {groups} parameter groups.")
        return list(bound)

    def _current_rates(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def _forget(self) -> None:
        self.best = BEST_AT_START[self.mode]
        self.num_good_epochs = self.num_bad_epochs = 0
        self.cooldown_counter = self.warmup_counter = 0
        self._streaming_avg = RollingMean(self.window_size) if self.smooth else None

    def step(self, metrics: float, epoch: int | None = None) -> None:
        """Judge one evaluation, and change the learning rate where it is time.

        Parameters:
            metrics: the value of the metric.
            epoch: the evaluation's number, for messages; by default one more than the last.
        """
        value = float(metrics)
        if self._streaming_avg is not None:
            value = self._streaming_avg.add(value)
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.num_good_epochs = self.num_bad_epochs = 0
        elif self.warmup_counter > 0:
            self.warmup_counter -= 1
            self.num_good_epochs = self.num_bad_epochs = 0
        else:
            self._judge(value)
        self._last_lr = self._current_rates()

    def _judge(self, value: float) -> None:
        if self.is_better(value, self.best):
            self.best = value
            self.num_good_epochs, self.num_bad_epochs = self.num_good_epochs + 1, 0
        else:
            self.num_good_epochs, self.num_bad_epochs = 0, self.num_bad_epochs + 1
        if self.num_good_epochs > self.patience:
            self._raise_rates()
            self.warmup_counter, self.num_good_epochs = self.warmup, 0
        elif self.num_bad_epochs > self.patience:
            # First the fall: at the lower bound it may start everything again, and the cooldown holds then too.
            self._lower_rates()
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0

    def is_better(self, current: float, best: float) -> bool:
        """Whether a value improves on the best one by more than the threshold.

        Parameters:
            current: the value of the last evaluation.
            best: the best one before it.
        """
        margin = self.threshold
        if self.mode == "min":
            return current < (best * (1.0 - margin) if self.threshold_mode == "rel" else best - margin)
        return current > (best * (1.0 + margin) if self.threshold_mode == "rel" else best + margin)

    def _raise_rates(self) -> None:
        for number, group in enumerate(self.optimizer.param_groups):
            self._change(number, group, min(float(group["lr"]) / self.factor, self.max_lrs[number]), direction=1)
        self.reset_start = self.reset_start_original

    def _lower_rates(self) -> None:
        for number, group in enumerate(self.optimizer.param_groups):
            self._change(number, group, max(float(group["lr"]) * self.factor, self.min_lrs[number]), direction=-1)
        rates_and_bounds = zip(self._current_rates(), self.min_lrs, strict=True)
        if any(rate > lowest for rate, lowest in rates_and_bounds):
            return
        self.reset_start -= 1
        if self.reset_start <= 0:
            self._start_again()

    def _change(self, number: int, group: dict[str, Any], rate: float, direction: int) -> None:
        if (rate - float(group["lr"])) * direction <= self.eps:
            return
        group["lr"] = rate
        if self.verbose:
            verb = "raises" if direction > 0 else "lowers"
            print(f"GreedyLR {verb} the learning rate of group {number} to {rate:.4e} (evaluation {self.last_epoch}).")

    def _start_again(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self._init_lrs, strict=True):
            group["lr"] = rate
        self._forget()
        self.reset_start = self.reset_start_original
        if self.verbose:
            print("GreedyLR starts again from the first learning rate.")

    def get_last_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return self._last_lr

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed schedule needs but the optimizer."""
        state = {name: getattr(self, name) for name in STATE_NAMES}
        if self._streaming_avg is not None:
            state["_streaming_avg"] = self._streaming_avg.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a saved schedule stood; the optimizer's learning rates are set to the saved ones.

        Parameters:
            state_dict: what `state_dict()` returned.
        """
        for name in STATE_NAMES:
            setattr(self, name, state_dict.get(name, getattr(self, name)))
        if "_streaming_avg" in state_dict:
            self._streaming_avg = RollingMean(self.window_size)
            self._streaming_avg.load_state_dict(state_dict["_streaming_avg"])
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=False):
            group["lr"] = rate
