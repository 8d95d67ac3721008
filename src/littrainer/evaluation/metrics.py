"""Calling a script's metric function, and what is wrong with what it is given or returns."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from numbers import Number
from typing import Any, Protocol

import numpy as np

from littrainer.arguments.choices import SaveStrategy
from littrainer.errors.nested_values import described
from littrainer.errors.notes import add_note, kind_of
from littrainer.evaluation.results import EvalPrediction, denumpify_detensorize


class MetricPlace(Protocol):
    """Where metrics are computed, and by what; a Trainer is one."""

    compute_metrics: Any
    is_in_train: bool
    # `save_strategy` of it says whether checkpoints hold the metrics.
    args: Any
    # `global_step` and `max_steps` of it say how far a training is.
    state: Any


def call_metric_function(place: MetricPlace, prediction: EvalPrediction, **keywords: Any) -> Any:
    """What `compute_metrics` returns; an error of its own leaves with a note that says where it happened.

    Parameters:
        keywords: further ones it is called with.
    """
    assert place.compute_metrics is not None
    with noting_where(place, prediction):
        return place.compute_metrics(prediction, **keywords)


@contextmanager
def noting_where(place: MetricPlace, prediction: EvalPrediction | None = None) -> Iterator[None]:
    """Errors of metrics within leave with a note that says where they happened.

    Parameters:
        prediction: what the metrics were given, for its kinds and shapes.
    """
    try:
        yield
    except Exception as error:
        name, given = _name_of(place.compute_metrics), _what_was_given(prediction)
        add_note(error, f"{name} raised this {_where(place)}.{given}{_what_is_left(place)}")
        raise


class NotedLogits(AbstractContextManager[None]):
    """Errors of `preprocess_logits_for_metrics` within leave with a note that says what it was called with."""

    def __init__(self, place: MetricPlace, logits: Any, labels: Any):
        self._place, self._given = place, (logits, labels)

    def __exit__(self, kind: Any, error: BaseException | None, raised_in: Any) -> None:
        if isinstance(error, Exception):
            logits, labels = map(described, self._given)
            add_note(
                error,
                f"preprocess_logits_for_metrics raised this {_where(self._place)}. It was called with the logits "
                f"of a batch, {logits}, and its labels, {labels}.",
            )


def checked_metrics(place: MetricPlace, metrics: Any) -> dict[str, Any]:
    """Metrics as Python numbers under their names.

    Raises:
        TypeError: they are no dict, one has no text as its name or is nothing that can be logged, or a checkpoint is
            to hold one and JSON cannot.
    """
    function = _name_of(place.compute_metrics)
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"{function} returned {_shortened(metrics)} {_where(place)}. It has to return a dict of names and "
            "numbers, such as {'accuracy': 0.5}."
        )
    for name in metrics:
        if not isinstance(name, str):
            raise TypeError(
                f"{function} returned a dict with the name {_shortened(name)} {_where(place)}. Names of metrics are "
                "texts; write str(...) around it."
            )
    plain = denumpify_detensorize(dict(metrics))
    if place.is_in_train and place.args.save_strategy != SaveStrategy.NO:
        for name, value in plain.items():
            if not _fits_into_json(value):
                raise TypeError(
                    f"{function} returned {name!r}: {_shortened(value)} {_where(place)}, and the checkpoints of this "
                    "training hold metrics as JSON. Return a number; an array of them as a list (.tolist())."
                )
    for name, value in plain.items():
        for culprit in _unloggable(value):
            holding = "" if culprit is value else f" which holds {_shortened(culprit)}"
            raise TypeError(
                f"{function} returned {name!r}: {_shortened(value)}{holding} {_where(place)}. A metric is a number; "
                "text, a bool, None, and lists, dicts and arrays of these are accepted too. Return what was computed, "
                "not what computes it."
            )
    return plain


def warn_without_result(compute_metrics: Any) -> None:
    """Warn that `batch_eval_metrics` has not asked for a result, since no batch was known to be the last."""
    warnings.warn(
        f"{_name_of(compute_metrics)} was never called with compute_result=True: with batch_eval_metrics=True the last "
        "batch asks for the result, and a DataLoader of one's own does not tell which batch is its last (as under "
        "transformers). Return trainer.accelerator.prepare(dataloader) from get_eval_dataloader or "
        "get_test_dataloader.",
        stacklevel=2,
    )


def _unloggable(value: Any) -> Iterator[Any]:
    """What there is within a metric that is neither number, text nor None."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        for entry in value:
            yield from _unloggable(entry)
    # Classes have the methods of their instances.
    elif isinstance(value, type) or not (
        value is None or isinstance(value, (str, Number, np.generic)) or hasattr(value, "__array__")
    ):
        yield value


def _fits_into_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _name_of(function: Any) -> str:
    return f"compute_metrics ({getattr(function, '__qualname__', type(function).__name__)})"


def _where(place: MetricPlace) -> str:
    if not place.is_in_train:
        return "in an evaluation outside of training"
    return f"in the evaluation at optimizer step {place.state.global_step} of {place.state.max_steps}"


def _what_was_given(prediction: EvalPrediction | None) -> str:
    if prediction is None:
        return ""
    return f" It was given predictions {described(prediction.predictions)}, labels {described(prediction.label_ids)}."


def _what_is_left(place: MetricPlace) -> str:
    if not place.is_in_train or place.args.save_strategy == SaveStrategy.NO:
        return ""
    return (
        " The checkpoints written before are complete: once it is mended, train(resume_from_checkpoint=True) goes on "
        "from the newest one."
    )


def _shortened(value: Any, longest: int = 80) -> str:
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= longest else text[:longest] + '...'} ({kind_of(value)})"
