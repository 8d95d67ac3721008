"""How predictions and labels of a batch go into a metric that is updated batch by batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from littrainer.errors.lazy_isinstance import is_a
from littrainer.errors.nested_values import PADDING
from littrainer.evaluation.results import EvalPrediction
from littrainer.model.facts import base_model, predicts_next_token, users_model

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

# What a metric's update is called with: positional arguments, or keywords.
Arguments = tuple[Any, ...] | dict[str, Any]


def classification(predictions: Any, labels: Any) -> Arguments:
    """The likeliest class of each sample or token, and its label; labels of -100 are left out."""
    return _counted(_likeliest(predictions, labels), labels)


def class_scores(predictions: Any, labels: Any) -> Arguments:
    """All classes' probabilities of each sample or token, `(N, C)`, and the label; labels of -100 are left out."""
    return _counted(_class_probabilities(predictions), labels)


def positive_class_scores(predictions: Any, labels: Any) -> Arguments:
    """The probability of the second of two classes, and the label, 0 or 1; labels of -100 are left out."""
    return _counted(_class_probabilities(predictions)[..., 1], labels)


def language_model(predictions: Any, labels: Any) -> Arguments:
    """The likeliest next token at each position, and the token that follows; labels of -100 are left out."""
    likeliest = _likeliest(predictions, labels)
    return _counted(likeliest[:, :-1], labels[:, 1:])


def language_model_scores(predictions: Any, labels: Any) -> Arguments:
    """All tokens' scores at each position, `(1, N, vocabulary)`, and the token that follows, `(1, N)`."""
    counted = labels[:, 1:] != PADDING
    scores = _in_full_precision(predictions[:, :-1][counted])
    return scores.unsqueeze(0), labels[:, 1:][counted].long().unsqueeze(0)


def multi_label(predictions: Any, labels: Any) -> Arguments:
    """Each label's score, and whether it holds, as 0 or 1."""
    return _in_full_precision(predictions), labels.long()


def multi_label_logits(predictions: Any, labels: Any) -> Arguments:
    """Each label's probability, made from a logit, and whether it holds, as 0 or 1."""
    return _in_full_precision(predictions).sigmoid(), labels.long()


def binary_logits(predictions: Any, labels: Any) -> Arguments:
    """The probability of the positive class, made from one logit, and the label, 0 or 1; labels of -100 are left out.

    A last dimension of 1 that the labels lack is dropped.
    """
    if predictions.dim() == labels.dim() + 1 and predictions.shape[-1] == 1:
        predictions = predictions.squeeze(-1)
    return _counted(_in_full_precision(predictions).sigmoid(), labels.long())


def regression(predictions: Any, labels: Any) -> Arguments:
    """Predicted and true numbers in one shape; a last dimension of 1 that only one side has is dropped."""
    if predictions.dim() == labels.dim() + 1 and predictions.shape[-1] == 1:
        predictions = predictions.squeeze(-1)
    return _in_full_precision(predictions), _in_full_precision(labels)


def unchanged(predictions: Any, labels: Any) -> Arguments:
    """Predictions and labels as they are."""
    return predictions, labels


CONVERSIONS: dict[str, Callable[[Any, Any], Arguments]] = {
    conversion.__name__: conversion
    for conversion in (
        classification,
        class_scores,
        positive_class_scores,
        language_model,
        language_model_scores,
        multi_label,
        multi_label_logits,
        binary_logits,
        regression,
        unchanged,
    )
}

MULTI_LABEL = "multi_label_classification"

# How far half precision may take the sum of a sample's probabilities from 1.
ROUNDING_OF_A_SUM = 1e-2

# Conversion to the likeliest class -> those that keep scores.
SCORES_INSTEAD = {
    "classification": ("class_scores", "positive_class_scores"),
    "language_model": ("language_model_scores",),
}


@dataclass(frozen=True)
class TaskFacts:
    """What is known of the model's task, where shapes alone do not tell how predictions and labels belong together.

    Parameters:
        predicts_next_token: labels belong to the position before; None where the model is not one whose class says.
        problem_type: `config.problem_type` of the model, which may have been set by its first forward pass.
        keeps_scores: predictions are what the model returned, and no code of the script has come in between.
        generates: predictions are generated tokens.
    """

    predicts_next_token: bool | None = None
    problem_type: str | None = None
    keeps_scores: bool = True
    generates: bool = False

    @property
    def has_multi_label_logits(self) -> bool:
        """Whether predictions are logits of labels that may hold together, as the losses of this problem take them."""
        return self.problem_type == MULTI_LABEL and self.keeps_scores


def task_facts(trainer: Trainer) -> TaskFacts:
    """What is known of the task of a Trainer's model."""
    return facts_of_task(
        trainer.model,
        trainer._loss_shifts_labels,
        # A script's own step may return probabilities, and their sigmoid would be above one half throughout.
        keeps_scores=trainer.preprocess_logits_for_metrics is None and not trainer._own_methods("prediction_step"),
        generates=bool(getattr(trainer.args, "predict_with_generate", False)),
    )


def facts_of_task(model: Any, shifts_labels: bool, keeps_scores: bool, generates: bool) -> TaskFacts:
    """What is known of the task of a model.

    Parameters:
        shifts_labels: its loss compares each label with the prediction one position before.
        keeps_scores, generates: as in `TaskFacts`.
    """
    model = base_model(users_model(model))
    next_token: bool | None = shifts_labels or None
    if next_token is None and is_a(model, "pretrained model"):
        next_token = predicts_next_token(model)
    return TaskFacts(
        predicts_next_token=next_token,
        problem_type=getattr(getattr(model, "config", None), "problem_type", None),
        keeps_scores=keeps_scores,
        generates=generates,
    )


def guessed_conversion(prediction: EvalPrediction, facts: TaskFacts) -> str:
    """The name of the conversion that fits a batch.

    Raises:
        ValueError: it cannot be told.
    """
    logits, labels = scores_in(prediction.predictions), prediction.label_ids
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
        if facts.predicts_next_token is None:
            raise _untold(
                prediction,
                "whether labels belong to their own position ('classification') or to the one before "
                "('language_model') is not known of this model",
            )
        return "language_model" if facts.predicts_next_token else "classification"
    if is_score and logits.shape == labels.shape:
        if facts.problem_type == MULTI_LABEL or (is_class and labels.dim() > 1):
            return "multi_label"
        return "unchanged" if is_class else "regression"
    raise _untold(prediction, "no conversion fits their shapes")


def converts_itself(metric: Any) -> bool:
    """Whether `update` of a metric, or of one that a collection or wrapper hands on to, is not torchmetrics' own."""
    if not is_a(metric, "torchmetrics metric"):
        return True
    updates = [type(module).update for module in metric.modules() if is_a(module, "torchmetrics metric")]
    return not all(update.__module__.startswith("torchmetrics.") for update in updates)


def settled_conversion(named: str, facts: TaskFacts) -> str:
    """The conversion of a name that a script has given, for the scores that the model gives.

    Torchmetrics takes the sigmoid batch by batch, where a score is below 0 or above 1: a batch of logits between them
    it would take for probabilities.
    """
    return "multi_label_logits" if named == "multi_label" and facts.has_multi_label_logits else named


def conversion_for(metric: Any, guess: str, prediction: EvalPrediction) -> str:
    """The guessed conversion, or the one that keeps scores where a metric goes over thresholds.

    Some of these, such as `BinaryAUROC`, would take likeliest classes for scores, and give a wrong number.
    """
    logits = scores_in(prediction.predictions)
    if guess != "classification" or not logits.is_floating_point() or not is_a(metric, "torchmetrics metric"):
        return guess
    # Those in a collection or a wrapper too.
    over_thresholds = [module for module in metric.modules() if hasattr(module, "thresholds")]
    if not over_thresholds:
        return guess
    takes_all_classes = any(hasattr(module, "num_classes") for module in over_thresholds)
    return "class_scores" if takes_all_classes or logits.shape[-1] != 2 else "positive_class_scores"


def converted(prediction: EvalPrediction, conversion: str | Callable[..., Any]) -> Arguments | None:
    """What update is to be called with; None where a function says that the batch is to be left out.

    Parameters:
        conversion: a name in `CONVERSIONS`; or a function of the predictions and labels, or of the `EvalPrediction`
            where it takes one argument. It returns a tuple of arguments, a dict of keywords, or one argument.
    """
    if isinstance(conversion, str):
        return CONVERSIONS[conversion](scores_in(prediction.predictions), prediction.label_ids)
    found = (
        conversion(prediction.predictions, prediction.label_ids) if _takes_two(conversion) else conversion(prediction)
    )
    if found is None or isinstance(found, (tuple, dict)):
        return found
    return (found,)


def scores_in(predictions: Any) -> Any:
    """The logits, which come first where a model has several outputs."""
    return predictions[0] if isinstance(predictions, (tuple, list)) and predictions else predictions


def described(value: Any) -> str:
    """Kinds and shapes of nested tensors or arrays, in one line."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {described(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of [{', '.join(map(described, value))}]"
    return type(value).__name__


def listed(arguments: Arguments) -> str:
    """Kinds and shapes of what update is called with."""
    if isinstance(arguments, dict):
        return ", ".join(f"{name}={described(value)}" for name, value in arguments.items())
    return ", ".join(map(described, arguments))


def _likeliest(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    # preprocess_logits_for_metrics may have taken the argmax already.
    return predictions if predictions.dim() == labels.dim() else predictions.argmax(dim=-1)


def _counted(predictions: torch.Tensor, labels: torch.Tensor) -> Arguments:
    counted = labels != PADDING
    return predictions[counted], labels[counted]


def _class_probabilities(predictions: torch.Tensor) -> torch.Tensor:
    # Torchmetrics turns scores into probabilities batch by batch, where one is below 0 or above 1: the scores of other
    # batches it would compare with the probabilities of these.
    scores = _in_full_precision(predictions)
    are_probabilities = (scores >= 0).all() & ((scores.sum(dim=-1) - 1).abs() < ROUNDING_OF_A_SUM).all()
    return torch.where(are_probabilities, scores, scores.softmax(dim=-1))


def _in_full_precision(values: torch.Tensor) -> torch.Tensor:
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def _takes_two(function: Callable[..., Any]) -> bool:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters) == 2


def _untold(prediction: EvalPrediction, reason: str) -> ValueError:
    return ValueError(
        "How predictions and labels go into the metrics of compute_metrics cannot be told: "
        f"predictions {described(prediction.predictions)}, labels {described(prediction.label_ids)}; {reason}. Say it: "
        f"StreamingMetrics(metric, inputs=...) with one of {', '.join(map(repr, CONVERSIONS))}, or a function of "
        "predictions and labels that returns what update takes."
    )
