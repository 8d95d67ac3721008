"""Writers of folders of trainings and hyperparameter searches."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from littrainer.search.record import SearchRecord, TrialRecord

RATE = {"kind": "float", "low": 1e-5, "high": 1e-1, "log": True, "step": None}
BATCH = {"kind": "categorical", "choices": [4, 8, 16]}
EPOCHS = {"kind": "int", "low": 1, "high": 5, "log": False, "step": 1}
EVALUATED = {"eval_loss": 0.625, "eval_accuracy": 0.875, "eval_runtime": 0.5, "eval_samples_per_second": 20.0}
SUMMARY = {"train_loss": 1.0, "train_runtime": 125.0, "train_samples_per_second": 64.0, "total_flos": 0.0}
LOGGED: list[Any] = [
    {"step": 2, "epoch": 0.5, "loss": 1.5, "learning_rate": 0.01, "grad_norm": 0.75},
    {"step": 4, "epoch": 1.0, "loss": 0.5, "learning_rate": 0.005, "grad_norm": 0.25},
    {"step": 4, "epoch": 1.0, **EVALUATED},
    {"step": 4, "epoch": 1.0, **SUMMARY},
]


def write_state(folder: Path, entries: list[Any] | None = None, **fields: Any) -> Path:
    """Write a folder with a trainer_state.json.

    Parameters:
        entries: its log_history, by default of a short training with an evaluation.
        fields: further fields of the state.
    """
    folder.mkdir(parents=True, exist_ok=True)
    history = LOGGED if entries is None else entries
    state = {"global_step": 4, "max_steps": 4, "epoch": 1.0, "num_train_epochs": 1, "log_history": history, **fields}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


def create_trials(count: int = 12, objectives: int = 1) -> list[TrialRecord]:
    """Create trials that are best at a learning rate of 0.001; the last two of twelve are pruned and failed."""
    trials = []
    for number in range(count):
        rate = 10.0 ** (-5 + 4 * ((number * 5) % count) / count)
        batch, epochs = (4, 8, 16)[number % 3], 1 + number % 5
        values = [0.9 - 0.05 * (math.log10(rate) + 3) ** 2, float(epochs)][:objectives]
        trial = TrialRecord(
            str(number),
            "complete",
            values[0] if objectives == 1 else values,
            {"learning_rate": rate, "per_device_train_batch_size": batch, "num_train_epochs": epochs},
            {"learning_rate": RATE, "per_device_train_batch_size": BATCH, "num_train_epochs": EPOCHS},
            [(10, 0.25), (20, values[0])] if objectives == 1 else [],
            30.0,
            f"out/run-{number}",
        )
        trials.append(trial)
    if count >= 12:
        trials[-2].state, trials[-2].objective = "pruned", None
        trials[-1].state, trials[-1].objective, trials[-1].error = "failed", None, "ValueError: too large"
        trials[-1].intermediate = []
    return trials


def write_search(
    folder: Path, trials: Sequence[TrialRecord] | None = None, directions: Sequence[str] = ("maximize",), **about: Any
) -> Path:
    """Write a folder with the record of a search.

    Parameters:
        trials: by default `create_trials()`.
        about: `backend`, `name` or `objective_names`.
    """
    args: Any = SimpleNamespace(output_dir=str(folder), process_index=0)
    record = SearchRecord(
        args, about.get("backend", "optuna"), directions, about.get("name"), about.get("objective_names")
    )
    record.update(create_trials(objectives=len(directions)) if trials is None else trials)
    return folder
