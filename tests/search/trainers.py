"""Trainers for searches whose trials take a few milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from littrainer import Trainer
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_arguments


def new_model() -> VectorClassifier:
    """Return a model whose first weights depend on the seed."""
    return VectorClassifier()


def searched_trainer(
    folder: Path | str,
    *,
    model_init: Callable[..., torch.nn.Module] = new_model,
    rows: int = 10,
    kind: type[Trainer] = Trainer,
    trainer_kwargs: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """Return a Trainer that can search, with `rows` training and seven evaluation vectors, by default for two steps.

    Parameters:
        trainer_kwargs: further or other keywords of the Trainer.
        changes: arguments of the run.
    """
    keywords: dict[str, Any] = {
        "train_dataset": Rows(vector_rows(rows)),
        "eval_dataset": Rows(vector_rows(7, seed=1)),
        **(trainer_kwargs or {}),
    }
    return kind(model_init=model_init, args=quiet_arguments(folder, **{"max_steps": 2, **changes}), **keywords)


def rate_space(trial: Any) -> dict[str, Any]:
    """Draw a learning rate."""
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)}
