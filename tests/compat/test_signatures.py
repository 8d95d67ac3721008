"""Methods take what those of transformers' newest release take: by position, by name, and with its defaults."""

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


def methods() -> Iterator[tuple[str, str]]:
    """Class and method; of those with an underscore the ones that ours has too, for subclasses override them."""
    for name, (ours, theirs) in CLASSES.items():
        for member in dir(theirs):
            is_shared = not member.startswith("_") or (not member.startswith("__") and hasattr(ours, member))
            if callable(getattr(theirs, member)) and (is_shared or member == "__init__"):
                yield name, member


# Method and parameter -> transformers' default, where it is None here.
UNSET = {
    # Only a given False keeps early stopping from going on.
    ("__init__", "restore_callback_states_from_checkpoint"): False,
    # Releases of transformers 4 did without.
    ("get_batch_samples", "device"): inspect.Parameter.empty,
    ("_maybe_log_save_evaluate", "start_time"): inspect.Parameter.empty,
}


def parameters_of(method: Any) -> list[tuple[str, Any, Any]]:
    """Name, kind and default of each parameter."""
    found = inspect.signature(method).parameters.values()
    defaults = {one.name: one.default for one in found if one.default is not None}
    unset = {name: default for (of, name), default in UNSET.items() if of == method.__name__}
    return [(one.name, one.kind, defaults.get(one.name, unset.get(one.name))) for one in found]


@pytest.mark.parametrize(("name", "method"), list(methods()))
def test_a_method_takes_the_parameters_of_transformers_in_their_order_with_their_defaults(
    name: str, method: str
) -> None:
    ours, theirs = (parameters_of(getattr(cls, method)) for cls in CLASSES[name])
    known = {parameter for parameter, _, _ in theirs}
    assert [one for one in ours if one[0] in known] == theirs
    # What is added has a default, and shifts nothing that is passed by position.
    by_position = [one for one in theirs if one[1] is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert ours[: len(by_position)] == by_position
    assert all(default is not inspect.Parameter.empty for parameter, _, default in ours if parameter not in known)


def test_formatted_metrics_are_had_from_the_class_and_from_an_instance() -> None:
    metrics = {"train_runtime": 3.25, "total_flos": 3 << 30, "loss": 0.123456}
    instance = littrainer.Trainer.__new__(littrainer.Trainer)
    formatted = transformers.Trainer.metrics_format(metrics)
    assert littrainer.Trainer.metrics_format(metrics) == instance.metrics_format(metrics) == formatted
