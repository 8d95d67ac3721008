"""Means of values that a script tracks in each micro-batch; see `Trainer.track`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

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
        # By name, and whether a script has tracked it: such a value replaces a loss term of its name.
        self._sums: dict[tuple[bool, str], torch.Tensor | float] = {}
        self._counts: dict[tuple[bool, str], int] = {}

    def add(self, name: str, value: torch.Tensor | float, weight: int = 1, is_tracked: bool = True) -> None:
        """Add a value, with the errors of `track` or, unless `is_tracked`, of `log_loss_terms`."""
        if name in LOGGED_BY_TRAINER or name.startswith(("eval_", "speed/")):
            source = "track()" if is_tracked else "log_loss_terms=True"
            advice = "choose another name" if is_tracked else "rename this output, or leave out log_loss_terms"
            raise ValueError(f"{source} cannot log {name!r}, which the Trainer logs itself: {advice}.")
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
        key = is_tracked, name
        self._sums[key] = self._sums.get(key, 0.0) + value * weight
        self._counts[key] = self._counts.get(key, 0) + weight

    def add_loss_terms(self, result: Any, weight: int = 1) -> tuple[Any, Any]:
        """Add the scalars named "...loss..." that `compute_loss` returned, and return its loss and outputs.

        Parameters:
            result: the loss, the pair of loss and outputs, or a dict with `loss`.
            weight: number of samples, for a mean over samples.
        """
        if isinstance(result, Mapping) and "loss" not in result:
            raise TypeError(f"compute_loss returned a dict with {', '.join(map(repr, result))}: add the sum as 'loss'.")
        loss, outputs = (result["loss"], result) if isinstance(result, Mapping) else (result, None)
        if isinstance(result, tuple):
            if len(result) != 2:
                raise TypeError(
                    f"compute_loss returned a tuple of {len(result)}, and log_loss_terms=True takes the loss, "
                    "(loss, outputs), or a dict with 'loss': return one of them."
                )
            loss, outputs = result
        # Models of detection return a `loss_dict`.
        groups = [value for name, value in _named_losses(outputs) if isinstance(value, Mapping)]
        for name, value in itertools.chain(*map(_named_losses, [outputs, *groups])):
            if isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point():
                self.add(name, value, weight, is_tracked=False)
        return loss, outputs

    def clear(self) -> None:
        self._sums, self._counts = {}, {}

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
        local = [(key, float(total), self._counts[key]) for key, total in self._sums.items()]
        self.clear()
        sums: dict[tuple[bool, str], float] = {}
        counts: dict[tuple[bool, str], int] = {}
        for key, total, count in gather_objects_across_processes(local):
            sums[key] = sums.get(key, 0.0) + total
            counts[key] = counts.get(key, 0) + count
        means = {key: sums[key] / counts[key] for key in sums}
        return {name: mean for (is_tracked, name), mean in means.items() if is_tracked or (True, name) not in means}


def _named_losses(outputs: Any) -> list[tuple[str, Any]]:
    items = outputs.items() if isinstance(outputs, Mapping) else ()
    return [(name, value) for name, value in items if "loss" in name and name != "loss"]


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
