"""Metric functions for the tiny tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def first_array(value: Any) -> Any:
    """The logits, where a model's predictions are a tuple whose first entry holds them."""
    return value[0] if isinstance(value, tuple) else value


def accuracy(prediction: Any) -> dict[str, float]:
    """Share of rows whose largest logit is their class; labels of -100 do not count."""
    guesses = np.argmax(first_array(prediction.predictions), axis=-1)
    counted = prediction.label_ids != -100
    return {"accuracy": float((guesses == prediction.label_ids)[counted].mean())}


def shapes_and_sums(prediction: Any) -> dict[str, float]:
    """Return a metric function's input as numbers: sums and sizes of its arrays."""
    numbers: dict[str, float] = {}
    for name in ("predictions", "label_ids", "inputs", "losses"):
        value = first_array(getattr(prediction, name, None))
        if value is not None:
            numbers[f"{name}_size"] = float(np.size(value))
            numbers[f"{name}_sum"] = float(np.sum(np.asarray(value, dtype=np.float64)))
    return numbers


class StreamingAccuracy:
    """Accuracy summed up batch by batch, for `batch_eval_metrics`."""

    def __init__(self) -> None:
        self.right = 0
        self.seen = 0

    def __call__(self, prediction: Any, compute_result: bool) -> dict[str, float]:
        logits = first_array(prediction.predictions)
        labels = prediction.label_ids
        # Batch by batch these are tensors of the device.
        guesses = np.argmax(np.asarray(logits.cpu() if isinstance(logits, torch.Tensor) else logits), axis=-1)
        labels = np.asarray(labels.cpu() if isinstance(labels, torch.Tensor) else labels)
        self.right += int((guesses == labels).sum())
        self.seen += int(labels.size)
        if not compute_result:
            return {}
        result = {"accuracy": self.right / self.seen, "seen": float(self.seen)}
        self.right = self.seen = 0
        return result
