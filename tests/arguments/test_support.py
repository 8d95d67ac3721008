from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from littrainer.arguments import TrainingArguments
from littrainer.arguments.support import (
    HONOURED_ENVIRONMENT,
    HONOURED_VALUES,
    refuse_unsupported,
)

# A value away from the default for each field whose type does not tell one.
WISHES: dict[str, Any] = {
    "fsdp_config": {"min_num_params": 1},
}


@pytest.mark.parametrize(
    "keywords",
    [
        {"fsdp": ""},
        {"fsdp": []},
        {"debug": []},
        {"gradient_checkpointing": False},
        {"deepspeed": {}},
        {"push_to_hub": None},
        {"accelerator_config": {"gradient_accumulation_kwargs": {}}},
    ],
    ids=str,
)
def test_another_way_to_ask_for_nothing_is_not_refused(keywords: dict[str, Any]) -> None:
    TrainingArguments(**keywords)


@pytest.mark.parametrize(("name", "honoured"), HONOURED_VALUES.items())
def test_listed_values_are_taken(name: str, honoured: tuple[str, ...]) -> None:
    for value in honoured:
        TrainingArguments(**{name: value})


@pytest.mark.parametrize(
    ("keywords", "shown"),
    [
        ({"debug": "tpu_metrics_debug"}, "debug=\\['tpu_metrics_debug'\\]"),
    ],
)
def test_other_values_are_refused_with_those_to_choose_from(keywords: dict[str, Any], shown: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{shown} .choose from "):
        TrainingArguments(**keywords)


@pytest.mark.parametrize("name", HONOURED_ENVIRONMENT)
def test_a_wish_in_the_environment_is_refused_and_a_launchers_no_is_taken(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "no")
    TrainingArguments()
    monkeypatch.setenv(name, "fp8" if "PRECISION" in name else "true")
    with pytest.raises(NotImplementedError, match=name):
        TrainingArguments()


def test_a_field_set_after_construction_is_refused_when_asked_again() -> None:
    args = TrainingArguments()
    refuse_unsupported(args)
    args.debug = "tpu_metrics_debug"
    with pytest.raises(NotImplementedError, match="debug='tpu_metrics_debug'"):
        refuse_unsupported(args)


def test_what_only_matters_with_refused_arguments_is_accepted() -> None:
    TrainingArguments(
        hub_model_id="me/model",
        hub_token="secret",
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        resume_from_checkpoint="somewhere",
        do_train=True,
        local_rank=0,
        run_name="one",
        project="mine",
        trackio_space_id="space",
    )


def test_a_subclass_cannot_make_an_unsupported_value_its_default() -> None:
    @dataclasses.dataclass
    class Published(TrainingArguments):
        debug: str = "tpu_metrics_debug"

    with pytest.raises(NotImplementedError, match=r"debug=.'tpu_metrics_debug'. .choose from underflow_overflow"):
        Published()


def test_the_tables_name_existing_arguments() -> None:
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert set(HONOURED_VALUES) <= names
