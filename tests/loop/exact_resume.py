"""Comparison of a resumed training with an uninterrupted training."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from littrainer import Trainer
from littrainer.data.resume.rng import get_rng_states
from tests.fidelity.first_difference import first_difference
from tests.scenarios.data import Rows, Stream, vector_rows
from tests.scenarios.models import NoisyClassifier
from tests.scenarios.trainers import quiet_arguments

WALL_TIME = ("runtime", "per_second")


class ShuffledStream(Stream):
    """A stream in a new order in each epoch, with noise in each row."""

    def __iter__(self) -> Iterator[Any]:
        rows = list(self.rows)
        random.shuffle(rows)
        for row in rows:
            yield {**row, "x": row["x"] + 0.1 * torch.rand(1)}


class StreamWithState(Stream):
    """A stream with `state_dict` that counts the rows read."""

    def __init__(self, rows: list[Any]) -> None:
        super().__init__(rows)
        self.next_row = self.rows_read = 0

    def state_dict(self) -> dict[str, int]:
        return {"next_row": self.next_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next_row = state["next_row"]

    def __iter__(self) -> Iterator[Any]:
        while self.next_row < len(self.rows):
            row = self.rows[self.next_row]
            self.next_row += 1
            self.rows_read += 1
            yield {**row, "x": row["x"] + 0.1 * torch.rand(1)}
        self.next_row = 0


def noisy_trainer(
    folder: Path,
    dataset: Any = None,
    kind: type[Trainer] = Trainer,
    trainer_kwargs: dict[str, Any] | None = None,
    **changes: Any,
) -> Trainer:
    """Return a Trainer that logs and saves at each step, with dropout and batch normalization."""
    settings: dict[str, Any] = {
        "num_train_epochs": 2,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        **changes,
    }
    torch.manual_seed(0)
    return kind(
        model=NoisyClassifier(),
        args=quiet_arguments(folder, **settings),
        train_dataset=Rows(vector_rows(18)) if dataset is None else dataset,
        eval_dataset=Rows(vector_rows(5, seed=1)),
        **(trainer_kwargs or {}),
    )


def outcome(trainer: Trainer) -> dict[str, Any]:
    """Return weights, optimizer, random states and logs of a training."""
    logs = [
        {name: value for name, value in entry.items() if not any(word in name for word in WALL_TIME)}
        for entry in trainer.state.log_history
        # The summary covers the last call only, as in transformers.
        if "train_loss" not in entry
    ]
    return {
        "weights": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict()["state"],
        "rates": [group["lr"] for group in trainer.optimizer.param_groups],
        "logs": logs,
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "best": (trainer.state.best_metric, trainer.state.best_global_step),
        "random states": get_rng_states(),
    }


def differences_after_resuming(folder: Path, build: Callable[[], Trainer], *steps: int) -> dict[int, str]:
    """Train, resume from the checkpoints of some steps, and return the first difference of each outcome, by step.

    Parameters:
        build: returns a Trainer with new model and data that saves to `folder`.
        steps: checkpoints to resume from.
    """
    reference = build()
    reference.train()
    expected = outcome(reference)
    differences = {}
    for step in steps:
        resumed = build()
        resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
        differences[step] = first_difference(expected, outcome(resumed))
    return {step: difference for step, difference in differences.items() if difference is not None}
