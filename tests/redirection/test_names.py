"""Attributes of replaced classes, compared with transformers."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from littrainer.redirection.names import REPLACED
from tests.compat.processes import facts_of

INTERNAL_OF_LOOP = (
    "_build_accelerator_args _prepare_for_training _run_epoch _prepare_context_parallel_inputs __backends "
    "_defer_fsdp_gradient_reduction _sync_replicated_trainable_parameters"
)
INTERNAL_OF_CONSTRUCTOR = (
    "is_torch_greater_or_equal_than_2_8 _dict_dtype_to_str _process_fsdp_args _apply_legacy_fsdp_to_config"
)
# Class -> internals that only transformers' class has.
THEIR_INTERNALS: dict[str, str] = {
    "Trainer": INTERNAL_OF_LOOP,
    "Seq2SeqTrainer": INTERNAL_OF_LOOP,
    "TrainingArguments": INTERNAL_OF_CONSTRUCTOR,
    "Seq2SeqTrainingArguments": INTERNAL_OF_CONSTRUCTOR,
    "TrackioCallback": (
        "SPACE_URL MIN_TRACKIO_VERSION_FOR_FREEZE BADGE_MARKDOWN _space_repo_name_from_project "
        "_point_model_card_at_space _freeze_space"
    ),
}
OTHER_VALUES = {"restore_callback_states_from_checkpoint"}


def replaced_classes() -> Iterator[tuple[Any, Any]]:
    for module, names in REPLACED.items():
        for name, target in names.items():
            theirs = getattr(importlib.import_module(module), name, None)
            home, attribute = target.split(":")
            if isinstance(theirs, type):
                yield theirs, getattr(importlib.import_module(home), attribute)


def get_attributes(cls: type) -> dict[str, Any]:
    if issubclass(cls, Enum):
        return {name: member.value for name, member in cls.__members__.items()}
    attributes = {name: value for kind in reversed(cls.__mro__[:-1]) for name, value in vars(kind).items()}
    return {name: value for name, value in attributes.items() if not (name.startswith("__") and name.endswith("__"))}


def make_comparable(value: Any) -> Any:
    """Return None for functions and descriptors, and a sorted list for a list."""
    return None if callable(value) or hasattr(value, "__get__") else sorted(value) if type(value) is list else value


def test_a_replaced_class_has_the_attributes_of_transformers() -> None:
    missing, different = {}, []
    for theirs, ours in replaced_classes():
        expected, actual = get_attributes(theirs), get_attributes(ours)
        missing[theirs.__name__] = {name for name in expected if not hasattr(ours, name)}
        for name in expected.keys() & actual.keys() - OTHER_VALUES:
            if make_comparable(expected[name]) != make_comparable(actual[name]):
                different.append(f"{theirs.__name__}.{name}: {actual[name]!r} instead of {expected[name]!r}")
    assert {name: names for name, names in missing.items() if names} == {
        name: set(names.split()) for name, names in THEIR_INTERNALS.items()
    }
    assert not different and len(missing) > 40


def test_a_subclass_of_the_arguments_may_override_the_validation() -> None:
    from littrainer import TrainingArguments

    class Strict(TrainingArguments):
        def _validate_args(self) -> None:
            super()._validate_args()
            if self.seed == 3:
                raise ValueError("not this seed")

    with pytest.raises(ValueError, match="not this seed"):
        Strict(seed=3)


IMPORTS_OF_TRANSFORMERS_4 = """
import littrainer.auto
from transformers import deepspeed
import transformers.deepspeed
from transformers.deepspeed import HfDeepSpeedConfig
from transformers.trainer import *
import importlib, transformers.training_args, transformers.trainer_utils, transformers.trainer
from littrainer.redirection.names import EARLIER

assert deepspeed.is_deepspeed_zero3_enabled() is False and "deepspeed_init" in dir(deepspeed)
assert nested_concat and ALL_LAYERNORM_LAYERS and is_bitsandbytes_available() in (True, False)
assert transformers.training_args.EvaluationStrategy is transformers.trainer_utils.IntervalStrategy
assert not hasattr(transformers.trainer, "smp_gather")
for module, names in EARLIER.items():
    for name in " ".join(names.values()).split():
        assert getattr(importlib.import_module(module), name) is not None, (module, name)
print("{}")
"""


def test_names_of_transformers_4_are_imported_from_their_current_modules(tmp_path: Path) -> None:
    facts_of(IMPORTS_OF_TRANSFORMERS_4, tmp_path)
