"""Calls of a script's metric function, with notes on its errors and checks of its result."""

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
    """Attributes of a Trainer that metrics depend on."""

    compute_metrics: Any
    preprocess_logits_for_metrics: Any
    is_in_train: bool
    args: Any
    state: Any


def call_metric_function(context: MetricContext, prediction: EvalPrediction, **keywords: Any) -> Any:
    assert context.compute_metrics is not None
    with explain_metric_errors(context, (prediction.predictions, prediction.label_ids)):
        return context.compute_metrics(prediction, **keywords)


@contextmanager
def explain_metric_errors(
    context: MetricContext, inputs: tuple[Any, Any] | None = None, function: str | None = None
) -> Iterator[None]:
    """Add a note with step, inputs and advice to errors of metrics in the block."""
    try:
        yield
    except Exception as error:
        note = f"{function or _name_function(context.compute_metrics)} raised this {_describe_step(context)}."
        if inputs is not None:
            predictions, labels = map(describe, inputs)
            note += f" It was given predictions {predictions}, labels {labels}."
        if context.is_in_train and context.args.save_strategy != SaveStrategy.NO:
            note += " After fixing it, train(resume_from_checkpoint=True) continues from the last checkpoint, if any."
        add_note(error, note)
        raise


def convert_metrics(context: MetricContext, metrics: Any) -> dict[str, Any]:
    """Return metrics as Python numbers; raise a TypeError for other results."""
    function = _name_function(context.compute_metrics)
    step = _describe_step(context)
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"{function} returned {_shorten(metrics)} {step}. It has to return a dict of names and numbers, such as "
            "{'accuracy': 0.5}."
        )
    for name in metrics:
        if not isinstance(name, str):
            raise TypeError(
                f"{function} returned a dict with the name {_shorten(name)} {step}. Names of metrics are texts; write "
                "str(...) around it."
            )
    plain = denumpify_detensorize(dict(metrics))
    if context.is_in_train and context.args.save_strategy != SaveStrategy.NO:
        for name, value in plain.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                raise TypeError(
                    f"{function} returned {name!r}: {_shorten(value)} {step}, and the checkpoints of this training "
                    "hold metrics as JSON. Return a number, or convert an array to a list of numbers (.tolist())."
                ) from None
    return plain


def _name_function(function: Any) -> str:
    return f"compute_metrics ({getattr(function, '__qualname__', type(function).__name__)})"


def _describe_step(context: MetricContext) -> str:
    if not context.is_in_train:
        return "in an evaluation outside of training"
    return f"in the evaluation at optimizer step {context.state.global_step} of {context.state.max_steps}"


def _shorten(value: Any, max_length: int = 80) -> str:
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= max_length else text[:max_length] + '...'} ({kind_of(value)})"
