"""What a Trainer logs, where Lightning's callbacks look for metrics."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import lightning.pytorch as pl

# What progress bars of Lightning show beside the rate; they add the name of each value.
SHOWN_IN_BARS = ("loss", "learning_rate", "eval_loss")

# Names that Lightning's callbacks keep for its own counts of epochs and optimizer steps.
COUNTS = ("epoch", "step")


def publish(lightning_trainer: pl.Trainer, logs: dict[str, Any]) -> None:
    """Put the numbers among logged values into `callback_metrics`, `logged_metrics` and `progress_bar_metrics`.

    Lightning's own callbacks add to these dictionaries in the same way. `LightningModule.log` is not called, as it may
    only be within some hooks, while a Trainer logs at any time.
    """
    values = {name: _tensor(value) for name, value in logs.items() if is_number(value) and name not in COUNTS}
    # In double precision, so that a callback compares what the Trainer's history shows.
    lightning_trainer.callback_metrics.update(values)
    lightning_trainer.logged_metrics.update(values)
    shown = {name: values[name].item() for name in SHOWN_IN_BARS if name in values}
    lightning_trainer.progress_bar_metrics.update(shown)


def is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    # Numbers of NumPy are registered as such too.
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _tensor(value: Any) -> torch.Tensor:
    return torch.tensor(float(value), dtype=torch.float64)
