"""Means of values that a script tracks in each micro-batch; see `Trainer.track`."""

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
    """Means of named values since the last log, until which tensors stay on their device."""

    def __init__(self) -> None:
        self.is_paused = False
        self._sums: dict[str, torch.Tensor | float] = {}
        self._counts: dict[str, int] = {}

    def add(self, name: str, value: torch.Tensor | float) -> None:
        """Add a value, with the errors of `track`."""
        if name in LOGGED_BY_TRAINER or name.startswith(("eval_", "speed/")):
            raise ValueError(f"track() cannot log {name!r}, which the Trainer logs itself: choose another name.")
        if self.is_paused:
            return
        try:
            if isinstance(value, torch.Tensor):
                # float64 for the precision of the sum, where the device has it.
                value = value.detach().reshape(()).to(torch.float32 if value.device.type == "mps" else torch.float64)
            else:
                value = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"track({name!r}) was given {kind_of(value)}, and takes one number: its mean().") from None
        self._sums[name] = self._sums.get(name, 0.0) + value
        self._counts[name] = self._counts.get(name, 0) + 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        was_paused, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = was_paused

    def take(self, device: torch.device) -> dict[str, float]:
        """Return the means over the processes that have tracked a value, and reset; a collective."""
        most_tracked = len(self._sums)
        if get_world_size() > 1:
            most_tracked = int(reduce_across_processes(torch.tensor(most_tracked, device=device), "max"))
        if not most_tracked:
            return {}
        local = [(name, float(total), self._counts[name]) for name, total in self._sums.items()]
        self._sums, self._counts = {}, {}
        sums: dict[str, float] = {}
        counts: dict[str, int] = {}
        for name, total, count in gather_objects_across_processes(local):
            sums[name] = sums.get(name, 0.0) + total
            counts[name] = counts.get(name, 0) + count
        return {name: sums[name] / counts[name] for name in sums}


_current_means: ContextVar[TrackedMeans | None] = ContextVar("tracked means of the current training", default=None)


@contextmanager
def collect_tracked_values(means: TrackedMeans) -> Iterator[None]:
    token = _current_means.set(means)
    try:
        yield
    finally:
        _current_means.reset(token)


def track(name: str, value: torch.Tensor | float) -> None:
    """Track a value of the current training from code without the Trainer, such as a model's `forward`.

    Outside of `train()` this has no effect.

    Parameters:
        name: name in the logs.
        value: a number, or a tensor with one element, which is not read from its device here.

    Raises:
        TypeError: the value is not a single number.
        ValueError: the Trainer logs another value under this name.

    Examples:
        >>> import torch
        >>> from littrainer import track
        >>> class RegularizedModel(torch.nn.Module):
        ...     def forward(self, x, labels):
        ...         penalty = x.square().mean()
        ...         track("penalty", penalty)
        ...         return {"loss": penalty}
    """
    means = _current_means.get()
    if means is not None:
        means.add(name, value)
