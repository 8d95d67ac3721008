"""LightningModules that remember what they are handed, over data of numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from littrainer import TrainerDataModule, set_seed
from littrainer.data.windows import MicroBatch
from tests.lightning_users.curves import QUIET

Row = dict[str, Any]


class Numbers(Dataset[Row]):
    """The numbers from 0 up, each in a row with a column that no model takes."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Row:
        return {"x": float(index), "unused": "text"}


class StreamOfNumbers(IterableDataset[Row]):
    """As `Numbers`, one after the other; how many there are nobody is told."""

    def __init__(self, count: int):
        self.rows = Numbers(count)

    def __iter__(self) -> Iterator[Row]:
        return (self.rows[index] for index in range(self.rows.count))


def collate(rows: list[Row]) -> dict[str, Any]:
    return {"x": torch.tensor([row["x"] for row in rows])}


def collate_with_noise(rows: list[Row]) -> dict[str, Any]:
    """Adds to the numbers what all generators of the host draw."""
    return {"x": collate(rows)["x"] + torch.rand(1) / 3 + random.random() / 3 + np.random.rand() / 3}


class Listener(nn.Module):
    """A model that remembers what it was trained on, and what it drew then, as dropout draws."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.heard: list[tuple[list[float], float]] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.heard.append((x.tolist(), torch.rand(1).item()))
        return {"loss": (self.weight * x).square().mean() * 1e-4}

    @property
    def numbers(self) -> list[list[float]]:
        """What it was trained on, micro-batch by micro-batch."""
        return [numbers for numbers, _ in self.heard]


class PlainModule(pl.LightningModule):
    """Anybody's LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Listener()
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
        # As modules do whose schedule has to know its length: the data is asked for before training begins.
        assert self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.01)


class CountingModule(PlainModule):
    """One that counts the items of a window, as TransformersModule does."""

    def items_in_window(self, window: list[Any]) -> int:
        return sum(len(batch["x"]) for batch in window)


class SavingOnce(pl.Callback):
    """Saves a checkpoint when a hook is called for the n-th time."""

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
    """The data module of a test, which makes batches of four."""
    return TrainerDataModule(rows, evaluated, args={**ARGUMENTS, **arguments}, data_collator=collator)


def lightning(**keywords: Any) -> pl.Trainer:
    """A `lightning.Trainer` that shows and writes nothing."""
    return pl.Trainer(**{**QUIET, "max_epochs": 3, **keywords})


def fit(module: PlainModule, data: TrainerDataModule, *, seed: int = 5, checkpoint: Any = None, **keywords: Any) -> Any:
    """Train, and return the model that has listened.

    Parameters:
        seed: of all generators, when training begins.
        checkpoint: to go on from.
        keywords: of the `lightning.Trainer`.
    """
    set_seed(seed)
    lightning(**keywords).fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    return module.model
