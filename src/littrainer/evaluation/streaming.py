"""Metrics that are updated batch by batch on the device, so that an evaluation keeps no predictions.

And how predictions and labels of a batch go into such a metric.
"""

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

# What a metric's update is called with: positional arguments, or keywords.
Arguments = tuple[Any, ...] | dict[str, Any]


# Name -> what update is called with, made of predictions and labels; but for "unchanged", labels of -100 are left out.
CONVERSIONS: dict[str, Callable[[Any, Any], Arguments]] = {
    # The likeliest class of each sample or token, and its label.
    "classification": lambda predictions, labels: _counted(_likeliest(predictions, labels), labels),
    # All classes' probabilities of each sample or token, `(N, C)`, and the label.
    "class_scores": lambda predictions, labels: _counted(_class_probabilities(predictions), labels),
    # The probability of the second of two classes, and the label, 0 or 1.
    "positive_class_scores": lambda predictions, labels: _counted(_class_probabilities(predictions)[..., 1], labels),
    # The likeliest next token at each position, and the token that follows.
    "language_model": lambda predictions, labels: _counted(_likeliest(predictions, labels)[:, :-1], labels[:, 1:]),
    # All tokens' scores at each position, `(1, N, vocabulary)`, and the token that follows, `(1, N)`.
    "language_model_scores": lambda predictions, labels: tuple(
        rows.unsqueeze(0) for rows in _counted(_in_full_precision(predictions[:, :-1]), labels[:, 1:].long())
    ),
    # Each label's score, or its probability made from a logit, and whether it holds, as 0 or 1.
    "multi_label": lambda predictions, labels: (_in_full_precision(predictions), labels.long()),
    "multi_label_logits": lambda predictions, labels: (_in_full_precision(predictions).sigmoid(), labels.long()),
    # The probability of the positive class, made from one logit, and the label, 0 or 1.
    "binary_logits": lambda predictions, labels: _counted(
        _in_full_precision(_without_last_dimension(predictions, labels)).sigmoid(), labels.long()
    ),
    # Predicted and true numbers in one shape.
    "regression": lambda predictions, labels: (
        _in_full_precision(_without_last_dimension(predictions, labels)),
        _in_full_precision(labels),
    ),
    "unchanged": lambda predictions, labels: (predictions, labels),
}

MULTI_LABEL = "multi_label_classification"

# How far half precision may take the sum of a sample's probabilities from 1.
ROUNDING_OF_A_SUM = 1e-2


@dataclass(frozen=True)
class TaskFacts:
    """What is known of the model's task, if shapes alone do not say how predictions and labels belong together.

    Parameters:
        is_causal_lm: labels belong to the position before; None if the model's class does not say.
        problem_type: `config.problem_type` of the model, which may have been set by its first forward pass.
        keeps_scores: predictions are what the model returned, and no code of the script has come in between.
        generates: predictions are generated tokens.
    """

    is_causal_lm: bool | None = None
    problem_type: str | None = None
    keeps_scores: bool = True
    generates: bool = False

    @property
    def has_multi_label_logits(self) -> bool:
        """Whether predictions are logits of labels that may hold together, as the losses of this problem take them."""
        return self.problem_type == MULTI_LABEL and self.keeps_scores


def find_task_facts(model: Any, shifts_labels: bool, keeps_scores: bool, generates: bool) -> TaskFacts:
    """Return what is known of the task of a model.

    Parameters:
        shifts_labels: its loss compares each label with the prediction one position before.
        keeps_scores, generates: as in `TaskFacts`.
    """
    model = base_model(unwrap_user_model(model))
    next_token: bool | None = shifts_labels or None
    if next_token is None and is_a(model, "pretrained model"):
        next_token = is_causal_lm(model)
    return TaskFacts(
        is_causal_lm=next_token,
        problem_type=getattr(getattr(model, "config", None), "problem_type", None),
        keeps_scores=keeps_scores,
        generates=generates,
    )


def guess_conversion(prediction: EvalPrediction, facts: TaskFacts) -> str:
    """Return the name of the conversion that fits a batch."""
    logits, labels = extract_scores(prediction.predictions), prediction.label_ids
    if facts.generates:
        raise _untold(prediction, "predict_with_generate makes the predictions generated tokens")
    if not isinstance(logits, torch.Tensor) or not isinstance(labels, torch.Tensor):
        raise _untold(prediction, "they are not one tensor each")
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
            raise _untold(
                prediction,
                "whether labels belong to their own position ('classification') or to the one before "
                "('language_model') is not known of this model",
            )
        return "language_model" if facts.is_causal_lm else "classification"
    if is_score and logits.shape == labels.shape:
        if facts.problem_type == MULTI_LABEL or (is_class and labels.dim() > 1):
            return "multi_label"
        return "unchanged" if is_class else "regression"
    raise _untold(prediction, "no conversion fits their shapes")


def has_custom_update(metric: Any) -> bool:
    """Return whether a metric, or one in a collection or wrapper, has an `update` that is not torchmetrics' own."""
    updates = [type(module).update for module in metric.modules() if is_a(module, "torchmetrics metric")]
    return not all(update.__module__.startswith("torchmetrics.") for update in updates)


def choose_conversion(metric: Any, guess: str, prediction: EvalPrediction) -> str:
    """Return the guessed conversion, or the one that keeps scores if a metric goes over thresholds.

    Some of these, such as `BinaryAUROC`, would take likeliest classes for scores, and give a wrong number.
    """
    logits = extract_scores(prediction.predictions)
    if guess != "classification" or not logits.is_floating_point():
        return guess
    # Those in a collection or a wrapper too.
    over_thresholds = [module for module in metric.modules() if hasattr(module, "thresholds")]
    if not over_thresholds:
        return guess
    takes_all_classes = any(hasattr(module, "num_classes") for module in over_thresholds)
    return "class_scores" if takes_all_classes or logits.shape[-1] != 2 else "positive_class_scores"


def convert_batch(prediction: EvalPrediction, conversion: str | Callable[..., Any]) -> Arguments | None:
    """Return what update is to be called with; None if a function leaves the batch out.

    Parameters:
        conversion: a name in `CONVERSIONS`; or a function of the predictions and labels, or of the `EvalPrediction`
            if it takes one argument. It returns a tuple of arguments, a dict of keywords, or one argument.
    """
    if isinstance(conversion, str):
        return CONVERSIONS[conversion](extract_scores(prediction.predictions), prediction.label_ids)
    given = (prediction.predictions, prediction.label_ids) if _takes_two(conversion) else (prediction,)
    found = conversion(*given)
    return found if found is None or isinstance(found, (tuple, dict)) else (found,)


def extract_scores(predictions: Any) -> Any:
    """Return the logits, which come first if a model has several outputs."""
    return predictions[0] if isinstance(predictions, (tuple, list)) and predictions else predictions


def _likeliest(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    # preprocess_logits_for_metrics may have taken the argmax already.
    return predictions if predictions.dim() == labels.dim() else predictions.argmax(dim=-1)


def _counted(predictions: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    counted = labels != PADDING
    return predictions[counted], labels[counted]


def _class_probabilities(predictions: torch.Tensor) -> torch.Tensor:
    # Torchmetrics turns scores into probabilities batch by batch, if one is below 0 or above 1: the scores of other
    # batches it would compare with the probabilities of these.
    scores = _in_full_precision(predictions)
    are_probabilities = (scores >= 0).all() & ((scores.sum(dim=-1) - 1).abs() < ROUNDING_OF_A_SUM).all()
    return torch.where(are_probabilities, scores, scores.softmax(dim=-1))


def _without_last_dimension(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    is_single = predictions.dim() == labels.dim() + 1 and predictions.shape[-1] == 1
    return predictions.squeeze(-1) if is_single else predictions


def _in_full_precision(values: torch.Tensor) -> torch.Tensor:
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def _takes_two(function: Callable[..., Any]) -> bool:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters) == 2


def _untold(prediction: EvalPrediction, reason: str) -> ValueError:
    return ValueError(
        "It is not known how predictions and labels go into the metrics of compute_metrics: "
        f"predictions {describe(prediction.predictions)}, labels {describe(prediction.label_ids)}; {reason}. Say it: "
        f"StreamingMetrics(metric, inputs=...) with one of {', '.join(map(repr, CONVERSIONS))}, or a function of "
        "predictions and labels that returns what update takes."
    )


class StreamingMetrics:
    """A metric for `compute_metrics` that sees each batch once and keeps nothing but its own state.

    Parameters:
        metric: a torchmetrics `Metric` or `MetricCollection`, or a dict of these by name.
        inputs: how predictions and labels of a batch go into `update`: a name in `CONVERSIONS` (`"classification"`,
            `"class_scores"`, `"positive_class_scores"`, `"language_model"`, `"language_model_scores"`, `"multi_label"`,
            `"multi_label_logits"`, `"binary_logits"`, `"regression"`, `"unchanged"`), or a function of predictions and
            labels that returns update's arguments (a tuple, a dict of keywords, or None to leave the batch out); one
            with a single parameter is given an `EvalPrediction`. By default shapes, kinds of numbers, the model and
            the metric decide; a metric whose `update` is not torchmetrics' own gets both unchanged.

    Raises:
        TypeError: it is no metric.
        ValueError: there is no conversion of that name, or no metric.
    """

    def __init__(self, metric: Any, inputs: str | Callable[..., Any] | None = None):
        if inputs is not None and not callable(inputs) and inputs not in CONVERSIONS:
            names = ", ".join(map(repr, CONVERSIONS))
            raise ValueError(f"inputs={inputs!r} of StreamingMetrics is neither a function nor one of {names}.")
        self.metric = metric
        self.inputs = inputs
        self._parts = dict(_parts_of(metric, inputs))
        if not self._parts:
            raise ValueError("compute_metrics is a dict without a metric: name one, such as {'accuracy': metric}.")
        self._read_facts: Callable[[], TaskFacts] = TaskFacts
        self._guess: str | None = None
        self.batches = 0

    def begin(self, device: torch.device, read_facts: Callable[[], TaskFacts]) -> None:
        """Forget what earlier evaluations have left, and move to the device of the model.

        Parameters:
            device: where the metrics keep their states.
            read_facts: returns what is known of the model's task, once a batch has been predicted.
        """
        self._guess, self.batches = None, 0
        # Not before the first batch: models of transformers find out about their problem in a forward pass.
        self._read_facts = read_facts
        self.reset()
        for part in self._parts.values():
            part.metric.to(device)

    def reset(self) -> None:
        """Reset the metrics."""
        for part in self._parts.values():
            part.metric.reset()

    def update(self, prediction: EvalPrediction) -> None:
        """Take in one batch.

        Parameters:
            prediction: the samples of this process.

        Raises:
            ValueError: a metric cannot take it, or it is not known how.
        """
        # Counted without rows too: computing is a matter of all processes, and the last batch may leave some without.
        self.batches += 1
        if _has_rows(prediction.label_ids):
            for name, part in self._parts.items():
                self._update(name, part, prediction)

    def compute(self) -> dict[str, Any]:
        """Return the metrics of all batches and processes by their names.

        A tensor of several numbers, as metrics for each class give, goes into one name for each: `recall_0`,
        `recall_1`; a matrix into `confusion_0_1`. What a metric names itself, in a dict, is joined to its name.

        Raises:
            TypeError: a metric gives something else than numbers.
        """
        # It may hold on to a model.
        self._read_facts = TaskFacts
        results: dict[str, Any] = {}
        for name, part in self._parts.items():
            results.update(_flat(part.names_itself, name, part.metric.compute(), type(part.metric).__name__))
        return results

    def _update(self, name: str, part: _Part, prediction: EvalPrediction) -> None:
        conversion = part.inputs
        if conversion is None and has_custom_update(part.metric):
            conversion = "unchanged"
        elif conversion is None:
            self._guess = self._guess or guess_conversion(prediction, self._read_facts())
            conversion = choose_conversion(part.metric, self._guess, prediction)
        arguments: Any = None
        try:
            arguments = convert_batch(prediction, conversion)
            if arguments is None or (isinstance(conversion, str) and not _has_rows(arguments)):
                return
            if isinstance(arguments, dict):
                part.metric.update(**arguments)
            else:
                part.metric.update(*arguments)
        except torch.OutOfMemoryError:
            raise
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            raise ValueError(_misfit(name, part, conversion, prediction, arguments, error)) from error


class _Part(NamedTuple):
    """One metric, or one collection of them.

    Parameters:
        names_itself: a dict that it computes holds full names.
    """

    metric: Any
    inputs: str | Callable[..., Any] | None
    names_itself: bool


def make_streaming_metrics(compute_metrics: Any) -> StreamingMetrics | None:
    """Return what a Trainer's `compute_metrics` is as streaming metrics; None if it is a function.

    Metrics of torchmetrics can be called too, but not with an `EvalPrediction`. Anything else that can be called is a
    function.

    Raises:
        TypeError, ValueError: it is neither a function nor metrics.
    """
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


def _parts_of(metric: Any, inputs: Any) -> Iterator[tuple[str, _Part]]:
    if isinstance(metric, Mapping):
        for name, entry in metric.items():
            own = entry.inputs if isinstance(entry, StreamingMetrics) else None
            entry = entry.metric if isinstance(entry, StreamingMetrics) else entry
            _check_is_metric(f"compute_metrics[{name!r}]", entry)
            yield str(name), _Part(entry, inputs if own is None else own, names_itself=False)
    else:
        _check_is_metric("compute_metrics", metric)
        yield _snake_case(type(metric).__name__), _Part(metric, inputs, names_itself=True)


def _check_is_metric(place: str, metric: Any) -> None:
    if not is_a(metric, "torchmetrics metric"):
        name = metric.__name__ if inspect.isclass(metric) else type(metric).__name__
        raise TypeError(f"{place} is no metric of torchmetrics ({name}): derive one from torchmetrics.Metric.")


def _has_rows(value: Any) -> bool:
    """Return whether the first tensor found in nested values has any."""
    if isinstance(value, torch.Tensor):
        return value.numel() > 0
    if isinstance(value, Mapping):
        value = list(value.values())
    return _has_rows(value[0]) if isinstance(value, (tuple, list)) and value else True


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _flat(names_itself: bool, name: str, value: Any, metric: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _flat(False, str(key) if names_itself else f"{name}_{key}", entry, metric)
        return
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
    if isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim:
        # A single number in a row is a number.
        value = list(value) if len(value) > 1 or value.ndim > 1 else value[0]
    if isinstance(value, (tuple, list)):
        for index, entry in enumerate(value):
            yield from _flat(False, f"{name}_{index}", entry, metric)
        return
    if not isinstance(value, (torch.Tensor, np.ndarray, np.generic, int, float)):
        raise TypeError(f"{metric}.compute() gave {value!r} for {name!r}, and metrics are numbers.")
    yield name, value.item() if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) else value


def _misfit(
    name: str, part: _Part, conversion: Any, prediction: EvalPrediction, arguments: Any, error: Exception
) -> str:
    way = f"inputs={conversion!r}" if isinstance(conversion, str) else "the function given as inputs"
    if part.inputs is None:
        way += " (chosen by their shapes and the model)"
    made = "failed" if arguments is None else f"made of them what update was called with: {describe(arguments)}"
    others = [repr(other) for other in CONVERSIONS if other != conversion]
    return (
        f"The metric {name!r} ({type(part.metric).__name__}) cannot take a batch: {error} (a {type(error).__name__}). "
        f"The batch has predictions {describe(prediction.predictions)} and labels {describe(prediction.label_ids)}; "
        f"{way} {made}. Check what the metric was made for. StreamingMetrics takes as inputs also {', '.join(others)}, "
        "or a function of predictions and labels that returns what update takes."
    )
