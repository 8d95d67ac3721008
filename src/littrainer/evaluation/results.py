"""Results of training, evaluation and prediction."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch


class TrainOutput(NamedTuple):
    """Result of `train()`.

    Parameters:
        global_step: optimizer steps, including steps before a resume.
        training_loss: mean loss over the steps of this call.
        metrics: `train_runtime` in seconds, `train_samples_per_second`, `train_steps_per_second`, `total_flos`,
            `train_loss` and `epoch`.
    """

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class EvalLoopOutput(NamedTuple):
    """Result of `evaluation_loop()`.

    Parameters:
        predictions: NumPy arrays of shape `(samples, ...)`, possibly nested; None with `prediction_loss_only`.
        label_ids: labels in the same form; None without labels.
        metrics: numbers by prefixed name.
        num_samples: number of evaluated samples.
    """

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None
    num_samples: int | None


class PredictionOutput(NamedTuple):
    """Result of `predict()`.

    Parameters:
        predictions: NumPy arrays of shape `(samples, ...)`, possibly nested, padded with -100 if batches differ in
            length.
        label_ids: labels in the same form; None without labels.
        metrics: numbers by prefixed name.
    """

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None


class EvalPrediction:
    """Argument of `compute_metrics`, which unpacks as predictions, labels and the other entries that are not None.

    Parameters:
        predictions: the model's outputs without the loss: an array of shape `(samples, ...)` or a tuple of arrays.
        label_ids: the labels: an array of shape `(samples, ...)` or a tuple of arrays.
        inputs: the model's main input, with `include_for_metrics=["inputs"]`.
        losses: loss of each sample's batch, with `include_for_metrics=["loss"]`.
    """

    def __init__(self, predictions: Any, label_ids: Any, inputs: Any = None, losses: Any = None):
        self.predictions = predictions
        self.label_ids = label_ids
        self.inputs = inputs
        self.losses = losses
        self.elements = (predictions, label_ids, *(entry for entry in (inputs, losses) if entry is not None))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self.elements):
            raise IndexError(f"EvalPrediction has {len(self.elements)} elements, there is no element {index}")
        return self.elements[index]


def speed_metrics(
    split: str,
    start_time: float,
    num_samples: float | None = None,
    num_steps: float | None = None,
    num_tokens: float | None = None,
) -> dict[str, float]:
    """Return `{split}_runtime` in seconds, and `{split}_samples_per_second`, `..._steps_...` and `..._tokens_...`."""
    seconds = time.time() - start_time
    metrics = {f"{split}_runtime": round(seconds, 4)}
    amounts = {"samples": num_samples, "steps": num_steps, "tokens": num_tokens}
    if seconds != 0:
        for name, amount in amounts.items():
            if amount is not None:
                metrics[f"{split}_{name}_per_second"] = round(amount / seconds, 3)
    return metrics


def denumpify_detensorize(metrics: Any) -> Any:
    """Return nested metrics as Python numbers."""
    if isinstance(metrics, dict):
        return type(metrics)({name: denumpify_detensorize(value) for name, value in metrics.items()})
    if isinstance(metrics, (list, tuple)):
        return type(metrics)(denumpify_detensorize(value) for value in metrics)
    is_number = isinstance(metrics, np.generic) or (isinstance(metrics, torch.Tensor) and metrics.numel() == 1)
    return metrics.item() if is_number else metrics
