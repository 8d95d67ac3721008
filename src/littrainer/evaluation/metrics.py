"""Calling a script's metric function, and what is wrong with what it is given or returns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from littrainer.arguments.choices import SaveStrategy
from littrainer.evaluation.results import EvalPrediction, denumpify_detensorize
from littrainer.runtime.nested_values import describe
from littrainer.runtime.notes import add_note, kind_of


class MetricContext(Protocol):
    """What computes metrics; a Trainer is one."""

    compute_metrics: Any
    preprocess_logits_for_metrics: Any
    is_in_train: bool
    # `save_strategy` of it says whether checkpoints hold the metrics.
    args: Any
    # `global_step` and `max_steps` of it say how far a training is.
    state: Any


def call_metric_function(place: MetricContext, prediction: EvalPrediction, **keywords: Any) -> Any:
    """Return what `compute_metrics` returns; its errors get a note that says where they happened."""
    assert place.compute_metrics is not None
    with explain_metric_errors(place, (prediction.predictions, prediction.label_ids)):
        return place.compute_metrics(prediction, **keywords)


@contextmanager
def explain_metric_errors(
    place: MetricContext, given: tuple[Any, Any] | None = None, function: str | None = None
) -> Iterator[None]:
    """Give errors of metrics in the block a note that says where they happened.

    Parameters:
        given: predictions and labels that the function was called with, for their kinds and shapes.
        function: its name, if it is not `compute_metrics`.
    """
    try:
        yield
    except Exception as error:
        note = f"{function or _name_of(place.compute_metrics)} raised this {_where(place)}."
        if given is not None:
            predictions, labels = map(describe, given)
            note += f" It was given predictions {predictions}, labels {labels}."
        if place.is_in_train and place.args.save_strategy != SaveStrategy.NO:
            note += " Once it is mended, train(resume_from_checkpoint=True) goes on from a checkpoint written before."
        add_note(error, note)
        raise


def check_metrics(place: MetricContext, metrics: Any) -> dict[str, Any]:
    """Return metrics as Python numbers under their names."""
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
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                raise TypeError(
                    f"{function} returned {name!r}: {_shortened(value)} {_where(place)}, and the checkpoints of this "
                    "training hold metrics as JSON. Return a number; an array of them as a list (.tolist())."
                ) from None
    return plain


def _name_of(function: Any) -> str:
    return f"compute_metrics ({getattr(function, '__qualname__', type(function).__name__)})"


def _where(place: MetricContext) -> str:
    if not place.is_in_train:
        return "in an evaluation outside of training"
    return f"in the evaluation at optimizer step {place.state.global_step} of {place.state.max_steps}"


def _shortened(value: Any, longest: int = 80) -> str:
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= longest else text[:longest] + '...'} ({kind_of(value)})"
