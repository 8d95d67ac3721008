"""The search spaces that are used where a script gives none: learning rate, epochs, seed and micro-batch size."""

from __future__ import annotations

import importlib
from typing import Any

LOWEST_LEARNING_RATE, HIGHEST_LEARNING_RATE = 1e-6, 1e-4
MOST_EPOCHS = 5
HIGHEST_SEED = 40
MICRO_BATCH_SIZES = [4, 8, 16, 32, 64]


def default_hp_space_optuna(trial: Any) -> dict[str, Any]:
    """Ask an Optuna trial for the four hyperparameters."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", LOWEST_LEARNING_RATE, HIGHEST_LEARNING_RATE, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, MOST_EPOCHS),
        "seed": trial.suggest_int("seed", 1, HIGHEST_SEED),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", MICRO_BATCH_SIZES),
    }


def default_hp_space_ray(trial: Any) -> dict[str, Any]:
    """The four hyperparameters as domains of Ray Tune.

    Parameters:
        trial: not read; a space of Ray's is given before there is a trial.

    Raises:
        ImportError: Ray Tune is not installed.
    """
    tune: Any = importlib.import_module("ray.tune")
    return {
        "learning_rate": tune.loguniform(LOWEST_LEARNING_RATE, HIGHEST_LEARNING_RATE),
        "num_train_epochs": tune.choice(list(range(1, MOST_EPOCHS + 1))),
        "seed": tune.uniform(1, HIGHEST_SEED),
        "per_device_train_batch_size": tune.choice(MICRO_BATCH_SIZES),
    }


def default_hp_space_wandb(trial: Any) -> dict[str, Any]:
    """The four hyperparameters as the configuration of a sweep of Weights & Biases.

    Parameters:
        trial: not read; a sweep is set up before there is a trial.
    """
    parameters = {
        "learning_rate": {"distribution": "uniform", "min": LOWEST_LEARNING_RATE, "max": HIGHEST_LEARNING_RATE},
        # One epoch more than with the other libraries, as in transformers.
        "num_train_epochs": {"distribution": "int_uniform", "min": 1, "max": MOST_EPOCHS + 1},
        "seed": {"distribution": "int_uniform", "min": 1, "max": HIGHEST_SEED},
        "per_device_train_batch_size": {"values": MICRO_BATCH_SIZES},
    }
    return {"method": "random", "metric": {"name": "objective", "goal": "minimize"}, "parameters": parameters}
