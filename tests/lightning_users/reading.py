"""LightningModules that record their batches, over data of numbers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn

from littrainer import TrainerDataModule, set_seed
from littrainer.data.windows import MicroBatch
from tests.lightning_users.curves import QUIET
from tests.scenarios.data import Row, Rows, Stream


class Numbers(Rows):
    """The numbers from 0, each in a row with an unused column."""

    def __init__(self, count: int):
        super().__init__([{"x": float(number), "unused": "text"} for number in range(count)])


class StreamOfNumbers(Stream):
    """A stream of `Numbers` without length."""

    def __init__(self, count: int):
        super().__init__(Numbers(count).rows)


def collate(rows: list[Row]) -> dict[str, Any]:
    return {"x": torch.tensor([row["x"] for row in rows])}


def collate_with_noise(rows: list[Row]) -> dict[str, Any]:
    """Add random draws of all generators of the host."""
    return {"x": collate(rows)["x"] + torch.rand(1) / 3 + random.random() / 3 + np.random.rand() / 3}


class RecordingModel(nn.Module):
    """A model that records its training batches and a random draw for each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.records: list[tuple[list[float], float]] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.records.append((x.tolist(), torch.rand(1).item()))
        return {"loss": (self.weight * x).square().mean() * 1e-4}

    @property
    def numbers(self) -> list[list[float]]:
        """The training micro-batches."""
        return [numbers for numbers, _ in self.records]


class PlainModule(pl.LightningModule):
    """A LightningModule that records its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.model = RecordingModel()
        self.windows: list[MicroBatch] = []
        self.evaluated: list[tuple[int, list[float]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        windows = getattr(self.trainer.train_dataloader, "handed_out", {})
        if batch_idx in windows:
            self.windows.append(windows[batch_idx])
        return self.model(**batch)["loss"]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if not self.trainer.sanity_checking:
            self.evaluated.append((dataloader_idx, batch["x"].tolist()))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluated.append((dataloader_idx, batch["x"].tolist()))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> list[float]:
        return batch["x"].tolist()

    def configure_optimizers(self) -> Any:
        # Loads the data before training, as modules with a schedule do.
        assert self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.01)


class CountingModule(PlainModule):
    """A module that counts the items of a window, as TransformersModule does."""

    def items_in_window(self, window: list[Any]) -> int:
        return sum(len(batch["x"]) for batch in window)


class SaveOnce(pl.Callback):
    """A callback that saves a checkpoint in the n-th call of a hook."""

    def __init__(self, path: Path, hook: str, number: int):
        self.path, self.number, self.calls = path, number, 0
        setattr(self, hook, self.count)

    def count(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.sanity_checking:
            return
        self.calls += 1
        if self.calls == self.number:
            trainer.save_checkpoint(self.path)


ARGUMENTS: dict[str, Any] = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 2, "use_cpu": True}


def numbers_module(rows: Any, collator: Any = collate, evaluated: Any = None, **arguments: Any) -> TrainerDataModule:
    """Return a data module with batches of four."""
    return TrainerDataModule(rows, evaluated, args={**ARGUMENTS, **arguments}, data_collator=collator)


def lightning(**keywords: Any) -> pl.Trainer:
    """Return a quiet `lightning.Trainer`."""
    return pl.Trainer(**{**QUIET, "max_epochs": 3, **keywords})


def fit(module: PlainModule, data: TrainerDataModule, *, seed: int = 5, checkpoint: Any = None, **keywords: Any) -> Any:
    """Train, and return the recording model.

    Parameters:
        seed: seed of all generators at the start.
        checkpoint: checkpoint to resume.
        keywords: keywords of the `lightning.Trainer`.
    """
    set_seed(seed)
    lightning(**keywords).fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    return module.model
