"""Streaming metrics, which are updated with each batch on the device, so that an evaluation keeps no predictions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from littrainer.evaluation.results import EvalPrediction
from littrainer.model.facts import base_model, is_causal_lm, unwrap_user_model
from littrainer.runtime.lazy_isinstance import is_a, loaded_classes
from littrainer.runtime.nested_values import PADDING, describe

# Positional arguments or keywords of a metric's `update`.
Arguments = tuple[Any, ...] | dict[str, Any]


# Name -> function of predictions and labels that returns the arguments of `update`. Conversions for classes and tokens
# leave out ignored labels (-100).
CONVERSIONS: dict[str, Callable[[Any, Any], Arguments]] = {
    # Most likely class, and label.
    "classification": lambda predictions, labels: _drop_ignored(_argmax(predictions, labels), labels),
    # Probabilities of all classes `(N, C)`, and label.
    "class_scores": lambda predictions, labels: _drop_ignored(_compute_probabilities(predictions), labels),
    # Probability of the second of two classes, and label (0 or 1).
    "positive_class_scores": lambda predictions, labels: _drop_ignored(
        _compute_probabilities(predictions)[..., 1], labels
    ),
    # Most likely next token, and true next token.
    "language_model": lambda predictions, labels: _drop_ignored(_argmax(predictions, labels)[:, :-1], labels[:, 1:]),
    # Scores of all tokens `(1, N, vocabulary)`, and next token `(1, N)`.
    "language_model_scores": lambda predictions, labels: tuple(
        rows.unsqueeze(0) for rows in _drop_ignored(_to_float32(predictions[:, :-1]), labels[:, 1:].long())
    ),
    # Score or probability of each label, and 0 or 1.
    "multi_label": lambda predictions, labels: (_to_float32(predictions), labels.long()),
    "multi_label_logits": lambda predictions, labels: (_to_float32(predictions).sigmoid(), labels.long()),
    # Probability of the positive class from a single logit, and label (0 or 1).
    "binary_logits": lambda predictions, labels: _drop_ignored(
        _to_float32(_squeeze_single(predictions, labels)).sigmoid(), labels.long()
    ),
    # Predicted and true numbers of equal shape.
    "regression": lambda predictions, labels: (
        _to_float32(_squeeze_single(predictions, labels)),
        _to_float32(labels),
    ),
    "unchanged": lambda predictions, labels: (predictions, labels),
}

MULTI_LABEL = "multi_label_classification"

# Tolerance for the sum of a sample's probabilities, which half precision rounds.
MAX_SUM_ERROR = 1e-2


@dataclass(frozen=True)
class TaskFacts:
    """Facts about a model's task that cannot be read from the shapes of predictions and labels.

    Parameters:
        is_causal_lm: each label is compared with the prediction one position before; None if unknown.
        problem_type: `config.problem_type` of the model, which its first forward pass may set.
        has_raw_scores: the script does not change the model's outputs.
        generates: predictions are generated tokens.
    """

    is_causal_lm: bool | None = None
    problem_type: str | None = None
    has_raw_scores: bool = True
    generates: bool = False

    @property
    def has_multi_label_logits(self) -> bool:
        return self.problem_type == MULTI_LABEL and self.has_raw_scores


def find_task_facts(model: Any, shifts_labels: bool, has_raw_scores: bool, generates: bool) -> TaskFacts:
    model = base_model(unwrap_user_model(model))
    is_causal: bool | None = shifts_labels or None
    if is_causal is None and is_a(model, "pretrained model"):
        is_causal = is_causal_lm(model)
    return TaskFacts(
        is_causal_lm=is_causal,
        problem_type=getattr(getattr(model, "config", None), "problem_type", None),
        has_raw_scores=has_raw_scores,
        generates=generates,
    )


def guess_conversion(prediction: EvalPrediction, facts: TaskFacts) -> str:
    """Return a conversion that fits a batch's shapes; raise a ValueError if none does."""
    logits, labels = extract_scores(prediction.predictions), prediction.label_ids
    if facts.generates:
        raise _make_unknown_error(prediction, "predict_with_generate gives generated tokens as predictions")
    if not isinstance(logits, torch.Tensor) or not isinstance(labels, torch.Tensor):
        raise _make_unknown_error(prediction, "they are not one tensor each")
    is_score, is_class = logits.is_floating_point(), not labels.is_floating_point()
    if is_score and logits.shape == labels.shape and facts.has_multi_label_logits:
        return "multi_label_logits"
    if is_score and logits.shape == (*labels.shape, 1):
        return "regression"
    has_classes = is_score and is_class and logits.shape[:-1] == labels.shape
    are_classes = not is_score and is_class and logits.shape == labels.shape
    if has_classes or are_classes:
        if labels.dim() < 2:
            return "classification"
        if facts.is_causal_lm is None:
            raise _make_unknown_error(
                prediction,
                "whether this model compares labels with predictions at their own position ('classification') or at "
                "the position before ('language_model') is not known",
            )
        return "language_model" if facts.is_causal_lm else "classification"
    if is_score and logits.shape == labels.shape:
        if facts.problem_type == MULTI_LABEL or (is_class and labels.dim() > 1):
            return "multi_label"
        return "unchanged" if is_class else "regression"
    raise _make_unknown_error(prediction, "no conversion fits their shapes")


def has_custom_update(metric: Any) -> bool:
    """Return whether a metric contains an `update` outside torchmetrics."""
    updates = [type(module).update for module in metric.modules() if is_a(module, "torchmetrics metric")]
    return not all(update.__module__.startswith("torchmetrics.") for update in updates)


def choose_conversion(metric: Any, guess: str, prediction: EvalPrediction) -> str:
    """Return the guess, or a conversion to scores for metrics with thresholds, such as `BinaryAUROC`."""
    logits = extract_scores(prediction.predictions)
    if guess != "classification" or not logits.is_floating_point():
        return guess
    threshold_metrics = [module for module in metric.modules() if hasattr(module, "thresholds")]
    if not threshold_metrics:
        return guess
    is_multiclass = any(hasattr(module, "num_classes") for module in threshold_metrics)
    return "class_scores" if is_multiclass or logits.shape[-1] != 2 else "positive_class_scores"


def convert_batch(prediction: EvalPrediction, conversion: str | Callable[..., Any]) -> Arguments | None:
    """Return the arguments of `update`; None if a function excludes the batch."""
    if isinstance(conversion, str):
        return CONVERSIONS[conversion](extract_scores(prediction.predictions), prediction.label_ids)
    inputs = (prediction.predictions, prediction.label_ids) if _has_two_parameters(conversion) else (prediction,)
    arguments = conversion(*inputs)
    return arguments if arguments is None or isinstance(arguments, (tuple, dict)) else (arguments,)


def extract_scores(predictions: Any) -> Any:
    """Return the logits; of several outputs the first."""
    return predictions[0] if isinstance(predictions, (tuple, list)) and predictions else predictions


def _argmax(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    # `preprocess_logits_for_metrics` may return class ids.
    return predictions if predictions.dim() == labels.dim() else predictions.argmax(dim=-1)


def _drop_ignored(predictions: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    is_counted = labels != PADDING
    return predictions[is_counted], labels[is_counted]


def _compute_probabilities(predictions: torch.Tensor) -> torch.Tensor:
    # torchmetrics applies softmax only to batches with a score outside [0, 1], and would take the raw scores of other
    # batches for probabilities.
    scores = _to_float32(predictions)
    are_probabilities = (scores >= 0).all() & ((scores.sum(dim=-1) - 1).abs() < MAX_SUM_ERROR).all()
    return torch.where(are_probabilities, scores, scores.softmax(dim=-1))


def _squeeze_single(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    is_single = predictions.dim() == labels.dim() + 1 and predictions.shape[-1] == 1
    return predictions.squeeze(-1) if is_single else predictions


def _to_float32(values: torch.Tensor) -> torch.Tensor:
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def _has_two_parameters(function: Callable[..., Any]) -> bool:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters) == 2


def _make_unknown_error(prediction: EvalPrediction, reason: str) -> ValueError:
    return ValueError(
        "No conversion of predictions and labels for the metrics of compute_metrics could be chosen: "
        f"predictions {describe(prediction.predictions)}, labels {describe(prediction.label_ids)}; {reason}. Choose: "
        f"StreamingMetrics(metric, inputs=...) with one of {', '.join(map(repr, CONVERSIONS))}, or a function of "
        "predictions and labels that returns what update takes."
    )


class StreamingMetrics:
    """Metric for `compute_metrics` that is updated with each batch and keeps no predictions.

    Parameters:
        metric: a torchmetrics `Metric` or `MetricCollection`, or a dict of these by name.
        inputs: conversion of predictions and labels to arguments of `update`: a name in `CONVERSIONS`
            (`"classification"`, `"class_scores"`, `"positive_class_scores"`, `"language_model"`,
            `"language_model_scores"`, `"multi_label"`, `"multi_label_logits"`, `"binary_logits"`, `"regression"`,
            `"unchanged"`), or a function of predictions and labels that returns a tuple, a dict of keywords, or None to
            exclude the batch; a function with a single parameter gets an `EvalPrediction`. The default depends on
            shapes, dtypes, model and metric; a metric whose `update` is the script's own gets predictions and labels
            unchanged.

    Raises:
        TypeError: a value is no metric.
        ValueError: there is no conversion of that name, or no metric.

    Examples:
        >>> from littrainer import StreamingMetrics, Trainer
        >>> from torchmetrics.classification import MulticlassAccuracy
        >>> metrics = StreamingMetrics(MulticlassAccuracy(num_classes=3))
        >>> trainer = Trainer(model, eval_dataset=eval_dataset, compute_metrics=metrics)
        >>> "eval_multiclass_accuracy" in trainer.evaluate()
        True
    """

    def __init__(self, metric: Any, inputs: str | Callable[..., Any] | None = None):
        if inputs is not None and not callable(inputs) and inputs not in CONVERSIONS:
            names = ", ".join(map(repr, CONVERSIONS))
            raise ValueError(f"inputs={inputs!r} of StreamingMetrics is neither a function nor one of {names}.")
        self.metric = metric
        self.inputs = inputs
        self._entries = dict(_iterate_entries(metric, inputs))
        if not self._entries:
            raise ValueError("compute_metrics is a dict without a metric: name one, such as {'accuracy': metric}.")
        self._read_facts: Callable[[], TaskFacts] = TaskFacts
        self._guess: str | None = None
        self.batches = 0

    def begin(self, device: torch.device, read_facts: Callable[[], TaskFacts]) -> None:
        """Reset the metrics for an evaluation, and move them to a device.

        Parameters:
            device: device of the metrics' states.
            read_facts: returns the facts; called after the first forward pass, which may set the model's problem type.
        """
        self._guess = None
        self.batches = 0
        self._read_facts = read_facts
        self.reset()
        for entry in self._entries.values():
            entry.metric.to(device)

    def reset(self) -> None:
        """Reset the metrics."""
        for entry in self._entries.values():
            entry.metric.reset()

    def update(self, prediction: EvalPrediction) -> None:
        """Update the metrics with a batch.

        Parameters:
            prediction: samples of this process.

        Raises:
            ValueError: no conversion fits, or a metric rejects the batch.
        """
        # Batches without rows count too, since a process without rows has to take part in `compute`, a collective call.
        self.batches += 1
        if _has_rows(prediction.label_ids):
            for name, entry in self._entries.items():
                self._update(name, entry, prediction)

    def compute(self) -> dict[str, Any]:
        """Return the metrics of all batches and processes by name.

        Tensors are flattened to names with indices, such as `recall_0` or `confusion_0_1`; keys of a dict are appended
        to the metric's name.

        Raises:
            TypeError: a metric returns values other than numbers.
        """
        # Release the model.
        self._read_facts = TaskFacts
        results: dict[str, Any] = {}
        for name, entry in self._entries.items():
            results.update(_flatten(entry.omits_prefix, name, entry.metric.compute(), type(entry.metric).__name__))
        return results

    def _update(self, name: str, entry: _Entry, prediction: EvalPrediction) -> None:
        conversion = entry.inputs
        if conversion is None and has_custom_update(entry.metric):
            conversion = "unchanged"
        elif conversion is None:
            self._guess = self._guess or guess_conversion(prediction, self._read_facts())
            conversion = choose_conversion(entry.metric, self._guess, prediction)
        arguments: Any = None
        try:
            arguments = convert_batch(prediction, conversion)
            if arguments is None or (isinstance(conversion, str) and not _has_rows(arguments)):
                return
            if isinstance(arguments, dict):
                entry.metric.update(**arguments)
            else:
                entry.metric.update(*arguments)
        except torch.OutOfMemoryError:
            raise
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            raise ValueError(_describe_mismatch(name, entry, conversion, prediction, arguments, error)) from error


class _Entry(NamedTuple):
    """Metric or collection with its conversion.

    Parameters:
        omits_prefix: the keys of a computed dict are complete names, to which the entry's name is not prepended.
    """

    metric: Any
    inputs: str | Callable[..., Any] | None
    omits_prefix: bool


def make_streaming_metrics(compute_metrics: Any) -> StreamingMetrics | None:
    """Return a Trainer's `compute_metrics` as streaming metrics; None for a function."""
    if compute_metrics is None or isinstance(compute_metrics, StreamingMetrics):
        return compute_metrics
    if is_a(compute_metrics, "torchmetrics metric"):
        return StreamingMetrics(compute_metrics)
    kinds = (StreamingMetrics, *loaded_classes("torchmetrics metric"))
    if inspect.isclass(compute_metrics) and issubclass(compute_metrics, kinds):
        raise TypeError(
            f"compute_metrics is the class {compute_metrics.__name__}; pass a metric, made with its arguments."
        )
    if callable(compute_metrics):
        return None
    if isinstance(compute_metrics, Mapping):
        return StreamingMetrics(compute_metrics)
    raise TypeError(
        f"compute_metrics is {compute_metrics!r}. It has to be a function of an EvalPrediction, a torchmetrics metric "
        "or collection, or a dict of these by name."
    )


def _iterate_entries(metric: Any, inputs: Any) -> Iterator[tuple[str, _Entry]]:
    if isinstance(metric, Mapping):
        for name, value in metric.items():
            override = value.inputs if isinstance(value, StreamingMetrics) else None
            value = value.metric if isinstance(value, StreamingMetrics) else value
            _check_is_metric(f"compute_metrics[{name!r}]", value)
            yield str(name), _Entry(value, inputs if override is None else override, omits_prefix=False)
    else:
        _check_is_metric("compute_metrics", metric)
        yield _snake_case(type(metric).__name__), _Entry(metric, inputs, omits_prefix=True)


def _check_is_metric(argument: str, metric: Any) -> None:
    if not is_a(metric, "torchmetrics metric"):
        name = metric.__name__ if inspect.isclass(metric) else type(metric).__name__
        raise TypeError(f"{argument} is no metric of torchmetrics ({name}): derive one from torchmetrics.Metric.")


def _has_rows(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() > 0
    if isinstance(value, Mapping):
        value = list(value.values())
    return _has_rows(value[0]) if isinstance(value, (tuple, list)) and value else True


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _flatten(omits_prefix: bool, name: str, value: Any, metric: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _flatten(False, str(key) if omits_prefix else f"{name}_{key}", entry, metric)
        return
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
    if isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim:
        value = list(value) if len(value) > 1 or value.ndim > 1 else value[0]
    if isinstance(value, (tuple, list)):
        for index, entry in enumerate(value):
            yield from _flatten(False, f"{name}_{index}", entry, metric)
        return
    if not isinstance(value, (torch.Tensor, np.ndarray, np.generic, int, float)):
        raise TypeError(f"{metric}.compute() gave {value!r} for {name!r}, and metrics are numbers.")
    yield name, value.item() if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) else value


def _describe_mismatch(
    name: str, entry: _Entry, conversion: Any, prediction: EvalPrediction, arguments: Any, error: Exception
) -> str:
    source = f"inputs={conversion!r}" if isinstance(conversion, str) else "the function given as inputs"
    if entry.inputs is None:
        source += " (chosen by their shapes and the model)"
    result = "failed" if arguments is None else f"converted them to the arguments of update: {describe(arguments)}"
    names = [repr(name) for name in CONVERSIONS if name != conversion]
    return (
        f"The metric {name!r} ({type(entry.metric).__name__}) cannot take a batch: {error} (a {type(error).__name__}). "
        f"The batch has predictions {describe(prediction.predictions)} and labels {describe(prediction.label_ids)}; "
        f"{source} {result}. Check what the metric was made for. StreamingMetrics takes as inputs also "
        f"{', '.join(names)}, or a function of predictions and labels that returns what update takes."
    )
