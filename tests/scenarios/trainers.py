"""Trainers for runs of a few milliseconds on the CPU, which write, log and show nothing unless a test asks for it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from littrainer import Trainer, TrainingArguments
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier

QUIET_RUN: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 3,
    "learning_rate": 0.01,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}


class StepwiseTrainer(Trainer):
    """Overrides training_step, and so runs in Lightning's manual optimization."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return super().training_step(model, inputs, num_items_in_batch)


def quiet_arguments(folder: Path | str, kind: Any = TrainingArguments, **changes: Any) -> Any:
    """Arguments of a short run.

    Parameters:
        kind: the class to make, ours or transformers'.
        changes: arguments on top of `QUIET_RUN`.
    """
    return kind(output_dir=str(folder), **{**QUIET_RUN, **changes})


def plain_descent(model: nn.Module, batches: Iterable[Any], learning_rate: float) -> list[float]:
    """Train on batches by steps against the gradient, with rates that fall linearly to 0; return the losses."""
    losses, batches = [], list(batches)
    for number, batch in enumerate(batches):
        loss = model(**batch)["loss"]
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= learning_rate * (1 - number / len(batches)) * gradient
        losses.append(loss.item())
    return losses


def quiet_trainer(
    folder: Path | str,
    model: nn.Module | None = None,
    *,
    rows: int = 10,
    kind: type[Trainer] = Trainer,
    trainer_kwargs: dict[str, Any] | None = None,
    **changes: Any,
) -> Trainer:
    """A Trainer over `rows` training vectors and seven evaluation vectors.

    Parameters:
        model: by default a classifier whose first weights are the same on every call.
        trainer_kwargs: keywords of the Trainer, on top of these or in their place.
        changes: arguments on top of `QUIET_RUN`.
    """
    keywords: dict[str, Any] = {
        "train_dataset": Rows(vector_rows(rows)),
        "eval_dataset": Rows(vector_rows(7, seed=1)),
        **(trainer_kwargs or {}),
    }
    if model is None:
        torch.manual_seed(0)
        model = VectorClassifier()
    return kind(model=model, args=quiet_arguments(folder, **changes), **keywords)


@contextmanager
def warnings_logged(part: str) -> Iterator[list[str]]:
    """Collect what this package warns of in its logs with a part of a text."""
    texts: list[str] = []

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.extend(text for text in [record.getMessage()] if part in text)

    handler = Collecting(logging.WARNING)
    logging.getLogger("littrainer").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("littrainer").removeHandler(handler)
