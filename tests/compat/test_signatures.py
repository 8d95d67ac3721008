"""Signatures of methods, compared with the newest release of transformers."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import transformers
from transformers.trainer_callback import CallbackHandler as TheirCallbackHandler

import littrainer
from littrainer.callbacks.handler import CallbackHandler

NAMES = ("Trainer", "Seq2SeqTrainer", "TrainingArguments", "Seq2SeqTrainingArguments", "TrainerCallback")
STATES = ("TrainerState", "TrainerControl")
CLASSES: dict[str, tuple[type, type]] = {
    **{name: (getattr(littrainer, name), getattr(transformers, name)) for name in (*NAMES, *STATES)},
    "CallbackHandler": (CallbackHandler, TheirCallbackHandler),
}


def list_methods() -> Iterator[tuple[str, str]]:
    """Yield class and method: public methods, and private methods that both classes have."""
    for name, (ours, theirs) in CLASSES.items():
        for member in dir(theirs):
            is_shared = not member.startswith("_") or (not member.startswith("__") and hasattr(ours, member))
            if callable(getattr(theirs, member)) and (is_shared or member == "__init__"):
                yield name, member


# Method and parameter -> transformers' default; None here.
UNSET = {
    # None restores early stopping.
    ("__init__", "restore_callback_states_from_checkpoint"): False,
    # Missing in transformers 4.
    ("get_batch_samples", "device"): inspect.Parameter.empty,
    ("_maybe_log_save_evaluate", "start_time"): inspect.Parameter.empty,
}


def parameters_of(method: Any) -> list[tuple[str, Any, Any]]:
    """Return name, kind and default of each parameter."""
    unset = {name: default for (method_name, name), default in UNSET.items() if method_name == method.__name__}
    return [
        (parameter.name, parameter.kind, unset.get(parameter.name) if parameter.default is None else parameter.default)
        for parameter in inspect.signature(method).parameters.values()
    ]


@pytest.mark.parametrize(("name", "method"), list(list_methods()))
def test_a_method_has_the_parameters_of_transformers_with_their_order_and_defaults(name: str, method: str) -> None:
    ours, theirs = (parameters_of(getattr(cls, method)) for cls in CLASSES[name])
    their_names = {parameter for parameter, _, _ in theirs}
    assert [parameter for parameter in ours if parameter[0] in their_names] == theirs
    # Added parameters have defaults and do not shift positional parameters.
    positional = [parameter for parameter in theirs if parameter[1] is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert ours[: len(positional)] == positional
    assert all(default is not inspect.Parameter.empty for name, _, default in ours if name not in their_names)


def test_metrics_format_is_callable_on_the_class_and_on_an_instance() -> None:
    metrics = {"train_runtime": 3.25, "total_flos": 3 << 30, "loss": 0.123456}
    instance = littrainer.Trainer.__new__(littrainer.Trainer)
    formatted = transformers.Trainer.metrics_format(metrics)
    assert littrainer.Trainer.metrics_format(metrics) == instance.metrics_format(metrics) == formatted
