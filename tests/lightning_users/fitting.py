"""Short runs of a module in a plain `lightning.Trainer`."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from littrainer import TransformersModule, default_data_collator, set_seed
from tests.lightning_users.curves import QUIET
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier

# The last micro-batch of 4 has 2.
ROWS = 10


class FitRecorder(pl.Callback):
    """A callback that records a training."""

    def __init__(self) -> None:
        self.learning_rates: list[float] = []
        self.losses: list[float] = []
        self.modes: set[bool] = set()
        # Before clipping, and after it except for the last optimizer step.
        self.gradients: list[torch.Tensor] = []
        self.clipped: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.modes |= {part.training for part in module.model.modules()}

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        self.learning_rates.append(optimizer.param_groups[0]["lr"])
        self.gradients.append(_gradients(module))

    def on_before_zero_grad(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        if any(parameter.grad is not None for parameter in module.parameters()):
            self.clipped.append(_gradients(module))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.losses.append(trainer.callback_metrics.get("train_loss", torch.tensor(0.0)).item())


def _gradients(module: Any) -> torch.Tensor:
    gradients = [parameter.grad for parameter in module.parameters()]
    return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None]).clone()


def make_module(model: Any = None, args: Any = None, **options: Any) -> TransformersModule:
    """Return a module around a tiny classifier with the same weights in every call."""
    set_seed(0)
    return TransformersModule(VectorClassifier() if model is None else model, args, **options)


def loader(rows: Any = None, batch_size: int = 4, collate: Any = default_data_collator) -> DataLoader[Any]:
    return DataLoader(Rows(vector_rows(ROWS) if rows is None else rows), batch_size=batch_size, collate_fn=collate)


def make_trainer(**keywords: Any) -> pl.Trainer:
    return pl.Trainer(**{"max_epochs": 1, "log_every_n_steps": 1, **QUIET, **keywords})


def fit_module(module: TransformersModule, train: Any = None, val: Any = None, **keywords: Any) -> pl.Trainer:
    trainer = make_trainer(**keywords)
    trainer.fit(module, loader() if train is None else train, val)
    return trainer


def record_fit(module: TransformersModule, train: Any = None, **keywords: Any) -> FitRecorder:
    recorder = FitRecorder()
    fit_module(module, train, **{**keywords, "callbacks": [*keywords.get("callbacks", []), recorder]})
    return recorder


def validate(module: TransformersModule, batches: Any = None) -> Any:
    """Return the metrics of the first loader."""
    return make_trainer().validate(module, loader() if batches is None else batches, verbose=False)[0]


def predict(module: TransformersModule, batches: Any = None) -> list[Any]:
    """Return the predictions of each batch."""
    predictions = make_trainer().predict(module, loader() if batches is None else batches)
    assert predictions is not None
    return predictions
