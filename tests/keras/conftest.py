"""Keras on its torch backend, whatever the environment."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from littrainer import TFTrainingArguments

SAMPLES = 12


@pytest.fixture(scope="session")
def keras() -> Any:
    """Import Keras, which selects its backend in its first import."""
    before = os.environ.get("KERAS_BACKEND")
    os.environ["KERAS_BACKEND"] = "torch"
    try:
        import keras
    finally:
        if before is None:
            del os.environ["KERAS_BACKEND"]
        else:
            os.environ["KERAS_BACKEND"] = before
    return keras


@pytest.fixture(scope="session")
def features() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(SAMPLES, 4)).astype("float32")


@pytest.fixture(scope="session")
def labels(features: np.ndarray) -> np.ndarray:
    return (features.sum(axis=1) > 0).astype("int64")


@pytest.fixture(scope="session")
def pairs(features: np.ndarray, labels: np.ndarray) -> list[tuple[Any, Any]]:
    return list(zip(features, labels, strict=True))


@pytest.fixture
def make_model(keras: Any) -> Any:
    """Return a function that creates a classifier with dropout, batch normalization and the same weights."""

    def make(**compiled: Any) -> Any:
        keras.utils.set_random_seed(0)
        layers = keras.layers
        model = keras.Sequential(
            [layers.Input((4,)), layers.Dense(6), layers.Dropout(0.3), layers.BatchNormalization(), layers.Dense(2)]
        )
        model.compile(**{"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True), **compiled})
        return model

    return make


@pytest.fixture
def linear_model(keras: Any) -> Any:
    """Return a classifier without random or batch-dependent layers."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.fixture
def arguments(tmp_path: Path) -> Any:
    """Return a function that creates arguments for two epochs of three micro-batches."""

    def make(**changed: Any) -> TFTrainingArguments:
        fields: dict[str, Any] = {
            "output_dir": str(tmp_path / "out"),
            "num_train_epochs": 2,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
        }
        return TFTrainingArguments(**{**fields, **changed})

    return make
