"""What training, evaluation and prediction return."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch


class TrainOutput(NamedTuple):
    """What `train()` returns.

    Parameters:
        global_step: optimizer steps done, those before a resume included.
        training_loss: the mean loss over the steps of this call.
        metrics: `train_runtime` in seconds, `train_samples_per_second`, `train_steps_per_second`, `total_flos`,
            `train_loss` and `epoch`.
    """

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class EvalLoopOutput(NamedTuple):
    """What `evaluation_loop()` returns.

    Parameters:
        predictions: NumPy arrays of shape `(samples, ...)`, possibly nested; None if only the loss was wanted.
        label_ids: the labels in the same way; None if there are none.
        metrics: numbers by name, each name with the prefix.
        num_samples: samples that were evaluated.
    """

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None
    num_samples: int | None


class PredictionOutput(NamedTuple):
    """What `predict()` returns.

    Parameters:
        predictions: NumPy arrays of shape `(samples, ...)`, possibly nested, padded with -100 if batches differ in
            length.
        label_ids: the labels in the same way; None if there are none.
        metrics: numbers by name, each name with the prefix.
    """

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None


class EvalPrediction:
    """What `compute_metrics` is given; it unpacks as a tuple of what there is, predictions and labels first.

    Parameters:
        predictions: the model's outputs without the loss, one array of shape `(samples, ...)` or a tuple of them.
        label_ids: the labels, one array of shape `(samples, ...)` or a tuple of them.
        inputs: the model's main input, with `include_for_metrics=["inputs"]`.
        losses: the loss for each sample's batch, with `include_for_metrics=["loss"]`.
    """

    def __init__(self, predictions: Any, label_ids: Any, inputs: Any = None, losses: Any = None):
        self.predictions = predictions
        self.label_ids = label_ids
        self.inputs = inputs
        self.losses = losses
        self.elements = (predictions, label_ids, *(extra for extra in (inputs, losses) if extra is not None))

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
    """Return seconds since `start_time`, and samples, steps and tokens per second, as `{split}_runtime` and so on.

    Parameters:
        split: prefix of the names, such as `train` or `eval`.
        start_time: `time.time()` when the work began.
        num_samples, num_steps, num_tokens: what was done since; a rate is given for each that is not None.
    """
    seconds = time.time() - start_time
    metrics = {f"{split}_runtime": round(seconds, 4)}
    amounts = {"samples": num_samples, "steps": num_steps, "tokens": num_tokens}
    if seconds != 0:
        for name, amount in amounts.items():
            if amount is not None:
                metrics[f"{split}_{name}_per_second"] = round(amount / seconds, 3)
    return metrics


def denumpify_detensorize(metrics: Any) -> Any:
    """Return the same nested metrics with NumPy numbers and one-element tensors as Python numbers, ready for JSON."""
    if isinstance(metrics, dict):
        return type(metrics)({name: denumpify_detensorize(value) for name, value in metrics.items()})
    if isinstance(metrics, (list, tuple)):
        return type(metrics)(denumpify_detensorize(value) for value in metrics)
    is_number = isinstance(metrics, np.generic) or (isinstance(metrics, torch.Tensor) and metrics.numel() == 1)
    return metrics.item() if is_number else metrics
