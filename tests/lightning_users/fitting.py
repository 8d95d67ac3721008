"""Short runs of a module in a plain `lightning.Trainer`."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from littrainer import TransformersModule, default_data_collator, set_seed
from tests.lightning_users.curves import QUIET
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier

# In micro-batches of 4 the last one has 2.
ROWS = 10


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
