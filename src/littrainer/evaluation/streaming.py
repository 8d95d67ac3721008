"""Metrics that are updated batch by batch on the device, so that an evaluation keeps no predictions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from littrainer.errors.lazy_isinstance import is_a, known_classes
from littrainer.evaluation.metric_inputs import (
    CONVERSIONS,
    SCORES_INSTEAD,
    TaskFacts,
    conversion_for,
    converted,
    converts_itself,
    described,
    guessed_conversion,
    listed,
    settled_conversion,
    unchanged,
)
from littrainer.evaluation.results import EvalPrediction

METHODS = ("update", "compute", "reset")


class StreamingMetrics:
    """A metric for `compute_metrics` that sees each batch once and keeps nothing but its own state.

    Parameters:
        metric: a torchmetrics `Metric` or `MetricCollection`, any object with `update`, `compute` and `reset`, or a
            dict of these by name.
        inputs: how predictions and labels of a batch go into `update`: a name in `CONVERSIONS` (`"classification"`,
            `"class_scores"`, `"positive_class_scores"`, `"language_model"`, `"language_model_scores"`, `"multi_label"`,
            `"multi_label_logits"`, `"binary_logits"`, `"regression"`, `"unchanged"`), or a function of predictions and
            labels that returns update's arguments (a tuple, a dict of keywords, or None to leave the batch out); one
            with a single parameter is given an `EvalPrediction`. By default it is told from the shapes, the kinds of
            numbers, the model and the metric; a metric whose `update` is not torchmetrics' own gets both unchanged.

    Raises:
        TypeError: it is no metric.
        ValueError: there is no conversion of that name, or no metric.
    """

    def __init__(self, metric: Any, inputs: str | Callable[..., Any] | None = None):
        if isinstance(inputs, str) and inputs not in CONVERSIONS:
            raise ValueError(f"inputs={inputs!r} of StreamingMetrics is none of {', '.join(map(repr, CONVERSIONS))}.")
        if inputs is not None and not isinstance(inputs, str) and not callable(inputs):
            raise TypeError(
                f"inputs of StreamingMetrics is a name or a function of predictions and labels, not {inputs!r}."
            )
        self.metric = metric
        self.inputs = inputs
        self._parts = dict(_parts_of(metric, inputs))
        if not self._parts:
            raise ValueError("compute_metrics is a dict without a metric: name one, such as {'accuracy': metric}.")
        self._read_facts: Callable[[], TaskFacts] = TaskFacts
        self._facts: TaskFacts | None = None
        self._guess: str | None = None
        self.batches = 0

    @property
    def needs_all_processes(self) -> bool:
        """Whether a metric has to be given the batches of all processes, since it does not put its states together."""
        return not all(_synchronises_itself(part.metric) for part in self._parts.values())

    def begin(self, device: torch.device, read_facts: Callable[[], TaskFacts]) -> None:
        """Forget what earlier evaluations have left, and move to the device of the model.

        Parameters:
            device: where the metrics keep their states.
            read_facts: tells what is known of the model's task, once a batch has been predicted.
        """
        self._guess, self._facts, self.batches = None, None, 0
        # Not before the first batch: models of transformers find out about their problem in a forward pass.
        self._read_facts = read_facts
        self.reset()
        for part in self._parts.values():
            if callable(getattr(part.metric, "to", None)):
                part.metric.to(device)

    def reset(self) -> None:
        """Forget the batches that the metrics have seen."""
        for part in self._parts.values():
            part.metric.reset()

    def update(self, prediction: EvalPrediction, everywhere: EvalPrediction | None = None) -> None:
        """Take in one batch.

        Parameters:
            prediction: the samples of this process.
            everywhere: those of all processes, for metrics that do not put their states together; by default the same.

        Raises:
            ValueError: a metric cannot take it, or how it is to take it cannot be told.
        """
        # Counted without rows too: computing is a matter of all processes, and the last batch may leave some without.
        self.batches += 1
        for name, part in self._parts.items():
            given = prediction if everywhere is None or _synchronises_itself(part.metric) else everywhere
            if _has_rows(given.label_ids):
                self._update(name, part, given)

    def compute(self) -> dict[str, Any]:
        """The metrics of all batches and processes by their names.

        A tensor of several numbers, as metrics for each class give, goes into one name for each: `recall_0`,
        `recall_1`; a matrix into `confusion_0_1`. What a metric names itself, in a dict, is joined to its name.

        Raises:
            TypeError: a metric gives something else than numbers.
        """
        results: dict[str, Any] = {}
        for name, part in self._parts.items():
            results.update(_flat(part.names_itself, name, part.metric.compute(), type(part.metric).__name__))
        return results

    def _update(self, name: str, part: _Part, prediction: EvalPrediction) -> None:
        conversion = part.inputs
        if self._facts is None:
            self._facts, self._read_facts = self._read_facts(), TaskFacts
        if conversion is None and converts_itself(part.metric):
            conversion = unchanged
        elif conversion is None:
            if self._guess is None:
                self._guess = guessed_conversion(prediction, self._facts)
            conversion = conversion_for(part.metric, self._guess, prediction)
        elif isinstance(conversion, str):
            conversion = settled_conversion(conversion, self._facts)
        arguments: Any = None
        try:
            arguments = converted(prediction, conversion)
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


class _Part:
    """One metric, or one collection of them.

    Parameters:
        place: where the script has given it, for errors.
        names_itself: a dict that it computes holds full names.
    """

    def __init__(self, place: str, metric: Any, inputs: str | Callable[..., Any] | None, names_itself: bool):
        if not has_metric_methods(metric):
            raise TypeError(
                f"{place} is no metric ({_class_name(metric)}): it needs the methods {', '.join(METHODS)}, as those of "
                "torchmetrics have them."
            )
        self.metric = metric
        self.inputs = inputs
        self.names_itself = names_itself


def streaming_metrics(compute_metrics: Any) -> StreamingMetrics | None:
    """What a Trainer's `compute_metrics` is as streaming metrics; None where it is a function.

    Metrics of torchmetrics can be called too, but not with an `EvalPrediction`. Anything else that can be called is a
    function, whatever further attributes it has.

    Raises:
        TypeError, ValueError: it is neither a function nor metrics.
    """
    if compute_metrics is None or isinstance(compute_metrics, StreamingMetrics):
        return compute_metrics
    if is_a(compute_metrics, "torchmetrics metric"):
        return StreamingMetrics(compute_metrics)
    kinds = (StreamingMetrics, *known_classes("torchmetrics metric"))
    if inspect.isclass(compute_metrics) and issubclass(compute_metrics, kinds):
        raise TypeError(
            f"compute_metrics is the class {compute_metrics.__name__}; pass a metric, made with its arguments."
        )
    if callable(compute_metrics):
        return None
    if isinstance(compute_metrics, Mapping) or has_metric_methods(compute_metrics):
        return StreamingMetrics(compute_metrics)
    raise TypeError(
        f"compute_metrics is {compute_metrics!r}. It has to be a function of an EvalPrediction, a torchmetrics metric "
        "or collection, an object with update, compute and reset, or a dict of metrics by name."
    )


def has_metric_methods(candidate: Any) -> bool:
    """Whether an object has the methods that streaming metrics are driven by."""
    return not inspect.isclass(candidate) and all(callable(getattr(candidate, name, None)) for name in METHODS)


def _parts_of(metric: Any, inputs: Any) -> Iterator[tuple[str, _Part]]:
    if isinstance(metric, StreamingMetrics):
        yield from _parts_of(metric.metric, metric.inputs if inputs is None else inputs)
    elif isinstance(metric, Mapping) and not has_metric_methods(metric):
        for name, entry in metric.items():
            own = entry.inputs if isinstance(entry, StreamingMetrics) else None
            entry = entry.metric if isinstance(entry, StreamingMetrics) else entry
            place = f"compute_metrics[{name!r}]"
            yield str(name), _Part(place, entry, inputs if own is None else own, names_itself=False)
    else:
        yield _snake_case(type(metric).__name__), _Part("compute_metrics", metric, inputs, names_itself=True)


def _synchronises_itself(metric: Any) -> bool:
    return is_a(metric, "torchmetrics metric")


def _has_rows(value: Any) -> bool:
    """Whether the first tensor found in nested values has any."""
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


def _class_name(value: Any) -> str:
    return value.__name__ if inspect.isclass(value) else type(value).__name__


def _misfit(
    name: str, part: _Part, conversion: Any, prediction: EvalPrediction, arguments: Any, error: Exception
) -> str:
    way = f"inputs={conversion!r}" if isinstance(conversion, str) else "the function given as inputs"
    if part.inputs is None:
        is_own = conversion is unchanged
        way = "the rule for own metrics (both unchanged)" if is_own else f"{way} (told from their shapes and the model)"
    given = (
        f"{way} failed before update was called"
        if arguments is None
        else f"{way} made of them what update was called with: {listed(arguments)}"
    )
    with_scores = SCORES_INSTEAD.get(conversion, ()) if isinstance(conversion, str) else ()
    ways = " or ".join(f"inputs={way!r}" for way in with_scores)
    hint = f" If it needs the scores, pass StreamingMetrics with {ways}." if ways else ""
    others = [repr(other) for other in CONVERSIONS if other != conversion]
    return (
        f"The metric {name!r} ({type(part.metric).__name__}) cannot take a batch: {error} (a {type(error).__name__}). "
        f"The batch has predictions {described(prediction.predictions)} and labels {described(prediction.label_ids)}; "
        f"{given}. Check what the metric was made for.{hint} StreamingMetrics takes as inputs also "
        f"{', '.join(others)}, or a function of predictions and labels that returns what update takes."
    )
