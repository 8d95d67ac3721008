"""Values that a script tracks in each micro-batch, logged as their means; see `Trainer.track`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from littrainer.distributed.collectives import gather_objects_across_processes, get_world_size, reduce_across_processes
from littrainer.runtime.notes import kind_of

LOGGED_BY_TRAINER = (
    *("loss", "grad_norm", "learning_rate", "epoch", "step", "num_input_tokens_seen", "total_flos", "ended_by"),
    *("train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second", "train_tokens_per_second"),
)


class TrackedMeans:
    """The means of named values since they were last logged; tensors stay on their device until then.

    Attributes:
        is_paused: whether values are skipped, as in an evaluation.
    """

    def __init__(self) -> None:
        self.is_paused = False
        self._sums: dict[str, torch.Tensor | float] = {}
        self._counts: dict[str, int] = {}

    def add(self, name: str, value: torch.Tensor | float) -> None:
        """Count a value; see `track` for what it raises."""
        if name in LOGGED_BY_TRAINER or name.startswith(("eval_", "speed/")):
            raise ValueError(f"track() cannot log {name!r}, which the Trainer logs itself: choose another name.")
        if self.is_paused:
            return
        try:
            if isinstance(value, torch.Tensor):
                # A sum in float64 takes no harm from many values; devices without it have float32.
                value = value.detach().reshape(()).to(torch.float32 if value.device.type == "mps" else torch.float64)
            else:
                value = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"track({name!r}) was given {kind_of(value)}, and takes one number: its mean().") from None
        self._sums[name] = self._sums.get(name, 0.0) + value
        self._counts[name] = self._counts.get(name, 0) + 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pass over values within the block."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def take(self, device: torch.device) -> dict[str, float]:
        """Return the mean of each value over all processes that have tracked it, and count from 0 again.

        Every process calls this at the same places.
        """
        most_tracked = len(self._sums)
        if get_world_size() > 1:
            most_tracked = int(reduce_across_processes(torch.tensor(most_tracked, device=device), "max"))
        if not most_tracked:
            return {}
        found = [(name, float(total), self._counts[name]) for name, total in self._sums.items()]
        self._sums, self._counts = {}, {}
        sums: dict[str, float] = {}
        counts: dict[str, int] = {}
        for name, total, count in gather_objects_across_processes(found):
            sums[name] = sums.get(name, 0.0) + total
            counts[name] = counts.get(name, 0) + count
        return {name: sums[name] / counts[name] for name in sums}


_of_training: ContextVar[TrackedMeans | None] = ContextVar("tracked means of the current training", default=None)


@contextmanager
def collect_tracked_values(means: TrackedMeans) -> Iterator[None]:
    """Let `track` add to these means."""
    token = _of_training.set(means)
    try:
        yield
    finally:
        _of_training.reset(token)


def track(name: str, value: torch.Tensor | float) -> None:
    """Track a value of the current training from code that does not have the Trainer, such as a model's `forward`.

    Outside of `train()` it does nothing.

    Parameters:
        name: what it is logged as.
        value: one number, or a tensor with one; it is not read from its device here.

    Raises:
        TypeError: the value is not one number.
        ValueError: the Trainer logs something else under this name.
    """
    means = _of_training.get()
    if means is not None:
        means.add(name, value)
