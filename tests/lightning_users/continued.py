"""A training to continue in the other Trainer, and the comparison of both."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from littrainer import Trainer
from tests.lightning_users.curves import get_weights
from tests.scenarios.data import AugmentedRows, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_trainer

# Six micro-batches of 4 in an epoch, and windows of 4 and 2.
ROWS, ACCUMULATION, EPOCHS, STEPS = 22, 4, 3, 6
# Optimizer step -> micro-batches done.
MICRO_BATCHES_DONE = {0: 0, 1: 4, 2: 6, 3: 10, 4: 12, 5: 16, 6: 18}


class DropoutClassifier(VectorClassifier):
    """A model with dropout that records its training losses."""

    def __init__(self, probability: float = 0.2) -> None:
        super().__init__()
        self.probability = probability
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        outputs: dict[str, Any] = super().forward(nn.functional.dropout(x, self.probability, self.training), labels)
        if self.training:
            self.losses.append(outputs["loss"].item())
        return outputs


def fresh_model(probability: float = 0.2) -> DropoutClassifier:
    torch.manual_seed(0)
    return DropoutClassifier(probability)


class StopAt(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == self.step


def build_trainer(
    folder: Path, model: Any = None, options: Any = None, kind: type[Trainer] = Trainer, **changes: Any
) -> Any:
    """Return a Trainer whose rows draw from all random generators."""
    keywords = {"train_dataset": AugmentedRows(vector_rows(ROWS)), **(options or {})}
    settings = {"num_train_epochs": EPOCHS, "gradient_accumulation_steps": ACCUMULATION, "warmup_steps": 2, **changes}
    return quiet_trainer(
        folder, fresh_model() if model is None else model, trainer_kwargs=keywords, kind=kind, **settings
    )


@functools.cache
def uninterrupted_model() -> DropoutClassifier:
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(Path(folder))
        trainer.train()
    assert trainer.state.global_step == STEPS
    model: DropoutClassifier = trainer.model
    return model


def resumed_model(step: int) -> DropoutClassifier:
    """Return a fresh model with the losses up to a step."""
    model = fresh_model()
    model.losses = uninterrupted_model().losses[: MICRO_BATCHES_DONE[step]]
    return model


def check_same(model: Any, other: Any = None) -> None:
    """Check that losses and weights equal those of the other training, bit for bit."""
    expected = uninterrupted_model() if other is None else other
    assert model.losses == expected.losses
    assert get_weights(model) == get_weights(expected)
