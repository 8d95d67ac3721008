"""Validation of values and combinations of arguments."""

from __future__ import annotations

import copy
import dataclasses
import math
import multiprocessing
import types
import typing
import warnings
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from littrainer import Seq2SeqTrainingArguments
from littrainer.arguments import TrainingArguments
from littrainer.arguments.fields import list_topics
from littrainer.arguments.normalization import CHOICE_FIELDS
from littrainer.arguments.rules import RANGES, TEXT_CHOICES, apply_global_batch_size, refuse_unsupported
from littrainer.loop.checks import check_arguments

ERRORS = (TypeError, ValueError, NotImplementedError, ImportError)
HINTS = {
    name: hint for topic in list_topics(Seq2SeqTrainingArguments) for name, hint in typing.get_type_hints(topic).items()
}
FIELDS = list(HINTS)

ANYTHING: list[Any] = [
    *(None, True, 3, -1, 2.5, math.nan, 10**400, -(10**400), complex(1, 1), np.int64(3), np.float32(0.5)),
    *("", "word", "~", "{", '{"a": 1}', "[1]", "5e-5", b"x", Path("somewhere"), object(), int, dict),
    *(np.bool_(True), [], [None, 1], ["a"], [True], ("a",), {"a"}, {}, {"a": 1}, {1: 2}, {"a": [None]}),
]


def members(hint: Any) -> list[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [member for part in typing.get_args(hint) for member in members(part)]
    return [hint]


def make_arguments(name: str, value: Any) -> TrainingArguments:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Seq2SeqTrainingArguments(**{name: value})


def get_error(name: str, value: Any) -> str | None:
    try:
        make_arguments(name, value)
    except ERRORS as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", FIELDS)
def test_any_value_is_accepted_or_raises_a_single_line_that_names_the_argument(name: str) -> None:
    for value in copy.deepcopy(ANYTHING):
        message = get_error(name, value)
        assert message is None or (name in message and message.strip() and "\n" not in message)


NUMBERS = [name for name in FIELDS if {int, float} & set(members(HINTS[name]))]
INTEGERS = [name for name in NUMBERS if float not in members(HINTS[name])]
SWITCHES = [name for name in FIELDS if bool in members(HINTS[name]) and str not in members(HINTS[name])]
TEXTS = [
    name
    for name in FIELDS
    if str in members(HINTS[name])
    and not any(isinstance(member, type) and issubclass(member, Enum) for member in members(HINTS[name]))
    and name != "accelerator_config"
]


@pytest.mark.parametrize(
    ("names", "values", "message"),
    [
        (NUMBERS, ["5", "", True, [1], b"5", math.nan], "^{}=.*number"),
        (sorted({*NUMBERS} - {"max_grad_norm"}), [math.inf, -math.inf], "^{}=-?inf "),
        (INTEGERS, [3.5], "^{}=.*whole number"),
        (SWITCHES, ["true", 2, 2.5, [True]], "^{}=.*true or false"),
        (TEXTS, [2, 2.5, b"x", object()], "^{}"),
        (list(CHOICE_FIELDS), [None, 2, True, [1], object()], "^{}: .*choose one of"),
    ],
    ids=["numbers", "finite", "whole numbers", "switches", "texts", "choices"],
)
def test_a_value_of_another_type_raises_with_the_valid_types(names: list[str], values: list[Any], message: str) -> None:
    for name in names:
        for value in values:
            with pytest.raises((TypeError, ValueError), match=message.format(name)):
                make_arguments(name, value)


def test_a_number_out_of_range_raises_with_the_range() -> None:
    # max_grad_norm may be infinite.
    assert set(RANGES) == set(NUMBERS) - {"hub_private_repo", "max_grad_norm"}
    for name, allowed in RANGES.items():
        upper = min(allowed.high, allowed.below)
        for value in (math.ceil(allowed.low) - 1, math.floor(upper) + 1 if upper < math.inf else -(10**9)):
            message = f"^{name}=.*out of range; give a .*number from {allowed.low:g} "
            with pytest.raises(ValueError, match=message.replace("+", r"\+")):
                make_arguments(name, value)


@pytest.mark.parametrize(("name", "choices"), TEXT_CHOICES.items())
def test_a_misspelt_choice_raises_with_the_nearest_choice(name: str, choices: tuple[str, ...]) -> None:
    for choice in choices:
        assert name not in (get_error(name, choice) or "")
        with pytest.raises(ValueError, match=f"^{name}='{choice}x' is not valid .*did you mean"):
            make_arguments(name, [f"{choice}x"] if name == "include_for_metrics" else f"{choice}x")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("learning_rate", 1, 1),
        ("learning_rate", np.float32(0.5), 0.5),
        ("num_train_epochs", np.int64(2), 2),
        ("per_device_train_batch_size", np.int32(4), 4),
        ("per_device_train_batch_size", 16.0, 16),
        ("max_steps", 1e3, 1000),
        ("use_cpu", np.bool_(True), True),
        ("use_cpu", 1, True),
        ("load_best_model_at_end", None, None),
    ],
)
def test_numbers_of_other_libraries_are_converted(name: str, value: Any, expected: Any) -> None:
    result = getattr(TrainingArguments(**{name: value}), name)
    assert result == expected and type(result) is type(expected)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("save_steps", [-1]),
        ("save_total_limit", [-1, 0]),
        ("max_grad_norm", [0, -1.0, math.inf]),
        *((name, [0]) for name in ("max_steps", "num_train_epochs", "eval_steps")),
        *((name, [Path("runs")]) for name in ("logging_dir", "output_dir")),
        ("resume_from_checkpoint", [True]),
        ("include_for_metrics", ["inputs"]),
        ("label_names", [("labels",)]),
        ("dataloader_multiprocessing_context", [multiprocessing.get_context("spawn")]),
        ("fsdp", ["", []]),
        *(("debug", [[]]), ("deepspeed", [{}]), ("push_to_hub", [None])),
    ],
)
def test_boundary_values_that_scripts_use_are_accepted(name: str, values: list[Any]) -> None:
    for value in values:
        make_arguments(name, value)


def test_a_number_as_text_raises_with_a_hint_about_yaml() -> None:
    with pytest.raises(TypeError, match=r"learning_rate='5e-5' is not usable; give a number from 0 up\..* 5\.0e-5"):
        TrainingArguments(learning_rate="5e-5")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"generation_config": {"max_length": 7}}, TypeError, "a path or GenerationConfig"),
        ({"generation_config": transformers.T5Config()}, TypeError, "generation_config"),
        ({"sortish_sampler": True, "train_sampling_strategy": "sequential"}, ValueError, "set one of them"),
    ],
    ids=str,
)
def test_an_invalid_generation_argument_raises(keywords: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Seq2SeqTrainingArguments("out", **keywords)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"max_tokens_per_batch": 0}, "give a whole number from 1 up"),
        ({"pack_to_length": 1}, "give a whole number from 2 up"),
        (
            {"max_tokens_per_batch": 9, "pack_to_length": 9},
            "pack_to_length=None, or leave max_tokens_per_batch out",
        ),
        ({"max_tokens_per_batch": 9, "train_sampling_strategy": "group_by_length"}, "train_sampling_strategy='random'"),
        ({"max_tokens_per_batch": 9, "auto_find_batch_size": True}, "Set auto_find_batch_size=False"),
        ({"max_tokens_per_batch": 9, "dataloader_drop_last": True}, "Set dataloader_drop_last=False"),
        ({"max_tokens_per_batch": 9, "eval_do_concat_batches": False}, "Set eval_do_concat_batches=True"),
        ({"max_tokens_per_batch": 9, "accelerator_config": {"dispatch_batches": True}}, "Set dispatch_batches=None"),
        ({"pack_to_length": 9, "accelerator_config": {"split_batches": True}}, "Set split_batches=False"),
        ({"pack_to_length": 9, "train_sampling_strategy": "sequential"}, "train_sampling_strategy='random'"),
    ],
    ids=str,
)
def test_batches_by_length_exclude_other_batch_settings(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingArguments("out", **keywords)


@pytest.mark.parametrize(
    "other",
    [
        {"auto_find_batch_size": True},
        {"ddp_static_graph": True},
        {"optim": "galore_adamw_layerwise"},
        {"optim": "lomo"},
    ],
    ids=str,
)
def test_auto_micro_batch_excludes_settings_that_prevent_a_repeated_step(
    other: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match=rf"auto_micro_batch does not go with {next(iter(other))}="):
        TrainingArguments("out", auto_micro_batch=True, **other)


def test_errors_never_show_a_token() -> None:
    secret: Any = ["hf_secret"]
    with pytest.raises(TypeError, match=r"^hub_token is not usable") as caught:
        TrainingArguments(hub_token=secret)
    assert "hf_secret" not in str(caught.value)


def test_a_subclass_may_give_a_field_a_default_of_another_type() -> None:
    @dataclasses.dataclass
    class TextDefault(TrainingArguments):
        bf16: bool | str = "auto"  # type: ignore[assignment]

        def __post_init__(self) -> None:
            self.bf16 = False if self.bf16 == "auto" else self.bf16
            super().__post_init__()

    @dataclasses.dataclass
    class NoneDefault(TrainingArguments):
        max_steps: int | None = None  # type: ignore[assignment]

    assert TextDefault().bf16 is False
    assert NoneDefault().max_steps is None
    with pytest.raises(TypeError, match="max_steps"):
        NoneDefault(max_steps="many")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "keywords", [{"dataloader_persistent_workers": True}, {"dataloader_multiprocessing_context": "spawn"}], ids=str
)
def test_values_set_after_construction_are_checked_by_a_trainer(tmp_path: Path, keywords: dict[str, Any]) -> None:
    args = TrainingArguments(str(tmp_path), **keywords)
    args.per_device_train_batch_size = 0
    with pytest.raises(ValueError, match="per_device_train_batch_size=0 is out of range"):
        check_arguments(args)
    args.per_device_train_batch_size = 1
    with pytest.raises(ValueError, match=f"{next(iter(keywords))}=.* needs loader processes.*dataloader_num_workers"):
        check_arguments(args)
    args.dataloader_num_workers = 1
    check_arguments(args)


def test_unsupported_values_of_environment_variables_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    args = TrainingArguments()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(NotImplementedError, match="ACCELERATE_MIXED_PRECISION"):
        TrainingArguments()
    args.debug = "tpu_metrics_debug"
    with pytest.raises(NotImplementedError, match=r"debug=\['tpu_metrics_debug'\]"):
        refuse_unsupported(args)


@pytest.mark.parametrize(("size", "processes", "steps"), [(8, 1, 8), (8, 4, 2), (16, 4, 1), (1, 2, 32)])
def test_accumulation_is_derived_from_the_global_batch_size(
    monkeypatch: pytest.MonkeyPatch, size: int, processes: int, steps: int
) -> None:
    monkeypatch.setattr(TrainingArguments, "world_size", processes)
    args = TrainingArguments("out", global_batch_size=64, per_device_train_batch_size=size, use_cpu=True)
    assert args.gradient_accumulation_steps == steps
    assert dataclasses.replace(args, global_batch_size=128).gradient_accumulation_steps == 2 * steps
    of_dict = TrainingArguments(**{**args.to_dict(), "global_batch_size": 128})
    assert of_dict.gradient_accumulation_steps == 2 * steps
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=3 and global_batch_size=64 are both set"):
        dataclasses.replace(args, gradient_accumulation_steps=3)
    args.global_batch_size = 192
    apply_global_batch_size(args)
    assert args.gradient_accumulation_steps == 3 * steps


@pytest.mark.parametrize(
    ("values", "processes", "message"),
    [
        ({"per_device_train_batch_size": 5}, 2, r"not a multiple of 10, .*Set .* to one of 3, 4, 6, 12\."),
        ({"per_device_train_batch_size": 500, "global_batch_size": 1000}, 4, r"Set .* to one of 125, 250\."),
        ({"per_device_train_batch_size": 2}, 5, r"global_batch_size=24 .*the 5 process.*Set it to a multiple of 5"),
        ({"gradient_accumulation_steps": 4}, 1, r"gradient_accumulation_steps=4 and global_batch_size=24 are both set"),
        ({"global_batch_size": 0}, 1, r"global_batch_size=0 is out of range"),
    ],
)
def test_an_indivisible_global_batch_size_raises_with_valid_sizes(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], processes: int, message: str
) -> None:
    monkeypatch.setattr(TrainingArguments, "world_size", processes)
    with pytest.raises(ValueError, match=message):
        TrainingArguments("out", use_cpu=True, **{"global_batch_size": 24, **values})


def test_split_batches_are_shared_by_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    settings = {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 8}
    assert TrainingArguments("out", global_batch_size=64, **settings).gradient_accumulation_steps == 8
