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

# In micro-batches of 4 the last one has 2.
ROWS = 10


class Seen(pl.Callback):
    """Notes what there is to see of a training."""

    def __init__(self) -> None:
        self.learning_rates: list[float] = []
        self.losses: list[float] = []
        self.modes: set[bool] = set()
        # Before they are clipped, and after that, but for the last optimizer step.
        self.gradients: list[torch.Tensor] = []
        self.clipped: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self.modes |= {part.training for part in module.model.modules()}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.learning_rates.append(optimizer.param_groups[0]["lr"])
        self.gradients.append(_gradients(module))

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if any(one.grad is not None for one in module.parameters()):
            self.clipped.append(_gradients(module))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.losses.append(trainer.callback_metrics.get("train_loss", torch.tensor(0.0)).item())


def _gradients(module: Any) -> torch.Tensor:
    return torch.cat([one.grad.flatten() for one in module.parameters() if one.grad is not None]).clone()


def module_of(model: Any = None, args: Any = None, **given: Any) -> TransformersModule:
    """A module around a tiny classifier, its weights the same on every call."""
    set_seed(0)
    return TransformersModule(VectorClassifier() if model is None else model, args, **given)


def loader(rows: Any = None, batch_size: int = 4, collate: Any = default_data_collator) -> DataLoader[Any]:
    return DataLoader(Rows(vector_rows(ROWS) if rows is None else rows), batch_size=batch_size, collate_fn=collate)


def trainer_for(**keywords: Any) -> pl.Trainer:
    return pl.Trainer(**{"max_epochs": 1, "log_every_n_steps": 1, **QUIET, **keywords})


def fitted(module: TransformersModule, train: Any = None, val: Any = None, **keywords: Any) -> pl.Trainer:
    """The lightning.Trainer that has trained a module."""
    trainer = trainer_for(**keywords)
    trainer.fit(module, loader() if train is None else train, val)
    return trainer


def seen_in(module: TransformersModule, train: Any = None, **keywords: Any) -> Seen:
    """What there was to see of a training."""
    seen = Seen()
    fitted(module, train, **{**keywords, "callbacks": [*keywords.get("callbacks", []), seen]})
    return seen


def validated(module: TransformersModule, batches: Any = None) -> Any:
    """The metrics of a validation, with the first loader."""
    return trainer_for().validate(module, loader() if batches is None else batches, verbose=False)[0]


def predicted(module: TransformersModule, batches: Any = None) -> list[Any]:
    """The predictions of each batch."""
    found = trainer_for().predict(module, loader() if batches is None else batches)
    assert found is not None
    return found
