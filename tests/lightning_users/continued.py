"""One training, and what is needed to go on with it on the other side and compare."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from littrainer import Trainer
from tests.lightning_users.curves import weights_of
from tests.scenarios.data import AugmentedRows, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_trainer

# Six micro-batches of 4 in an epoch, and windows of 4 and 2.
ROWS, ACCUMULATION, EPOCHS, STEPS = 22, 4, 3, 6
# Optimizer step -> micro-batches behind it.
BEHIND = {0: 0, 1: 4, 2: 6, 3: 10, 4: 12, 5: 16, 6: 18}


class DropsOut(VectorClassifier):
    """Draws random numbers in its forward pass, and notes the losses of its training."""

    def __init__(self, share: float = 0.2) -> None:
        super().__init__()
        self.share = share
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        outputs: dict[str, Any] = super().forward(nn.functional.dropout(x, self.share, self.training), labels)
        if self.training:
            self.losses.append(outputs["loss"].item())
        return outputs


def fresh_model(share: float = 0.2) -> DropsOut:
    torch.manual_seed(0)
    return DropsOut(share)


class StopsLightningAt(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *others: Any) -> None:
        trainer.should_stop = trainer.global_step == self.step


def trainer_of(
    folder: Path, model: Any = None, given: Any = None, kind: type[Trainer] = Trainer, **changes: Any
) -> Any:
    """A Trainer whose rows draw from all random generators when they are read."""
    keywords = {"train_dataset": AugmentedRows(vector_rows(ROWS)), **(given or {})}
    settings = {"num_train_epochs": EPOCHS, "gradient_accumulation_steps": ACCUMULATION, "warmup_steps": 2, **changes}
    return quiet_trainer(folder, fresh_model() if model is None else model, given=keywords, kind=kind, **settings)


@functools.cache
def whole() -> DropsOut:
    """The model of a training that stayed in one Trainer."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(Path(folder))
        trainer.train()
    assert trainer.state.global_step == STEPS
    model: DropsOut = trainer.model
    return model


def resumed_model(step: int) -> DropsOut:
    """A fresh model that has the losses up to a step noted already."""
    model = fresh_model()
    model.losses = whole().losses[: BEHIND[step]]
    return model


def check_same(model: Any, other: Any = None) -> None:
    """See that the losses of all micro-batches and the last weights are those of the other training, bit for bit."""
    expected = whole() if other is None else other
    assert model.losses == expected.losses
    assert weights_of(model) == weights_of(expected)
