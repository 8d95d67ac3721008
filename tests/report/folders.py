"""Folders as trainings leave them, of a few entries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LOGGED: list[Any] = [
    {"step": 2, "epoch": 0.5, "loss": 1.5, "learning_rate": 0.01, "grad_norm": 0.75},
    {"step": 4, "epoch": 1.0, "loss": 0.5, "learning_rate": 0.005, "grad_norm": 0.25},
    {
        "step": 4,
        "epoch": 1.0,
        "eval_loss": 0.625,
        "eval_accuracy": 0.875,
        "eval_runtime": 0.5,
        "eval_samples_per_second": 20.0,
    },
    {
        "step": 4,
        "epoch": 1.0,
        "train_loss": 1.0,
        "train_runtime": 125.0,
        "train_samples_per_second": 64.0,
        "total_flos": 0.0,
    },
]


def write_state(folder: Path, entries: list[Any] | None = None, **fields: Any) -> Path:
    """A folder with a trainer_state.json.

    Parameters:
        entries: its log_history, by default that of a short training with one evaluation.
        fields: further fields of the state.
    """
    folder.mkdir(parents=True, exist_ok=True)
    history = LOGGED if entries is None else entries
    state = {"global_step": 4, "max_steps": 4, "epoch": 1.0, "num_train_epochs": 1, "log_history": history, **fields}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder
