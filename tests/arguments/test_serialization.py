from __future__ import annotations

import dataclasses
import json
from typing import Any, ClassVar

import pytest
import torch
import transformers

from littrainer import Seq2SeqTrainingArguments
from littrainer.arguments import TrainingArguments
from tests.arguments.test_fields import ONLY_OURS

GIVEN: dict[str, Any] = {
    "output_dir": "out",
    "hub_token": "hf_secret",
    "eval_strategy": "steps",
    "lr_scheduler_kwargs": {"power": 2.0},
    "label_names": ["a"],
    "use_cpu": True,
}


@dataclasses.dataclass
class WithModelKeywords(TrainingArguments):
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]

    model_init_kwargs: dict[str, Any] | str | None = None
    service_token: str | None = None


def _without_ours(values: dict[str, Any]) -> dict[str, Any]:
    for name in ONLY_OURS:
        del values[name]
    return values


@pytest.mark.parametrize("given", [{}, GIVEN], ids=["defaults", "given"])
def test_the_dict_holds_what_that_of_transformers_holds(given: dict[str, Any]) -> None:
    ours, theirs = TrainingArguments(**given).to_dict(), transformers.TrainingArguments(**given).to_dict()
    assert _without_ours(ours) == theirs
    assert list(ours) == list(theirs)
    assert {type(value) for value in ours.values()} == {type(value) for value in theirs.values()}


def test_the_sanitized_dict_holds_what_that_of_transformers_holds() -> None:
    ours = TrainingArguments(**GIVEN).to_sanitized_dict()
    theirs = transformers.TrainingArguments(**GIVEN).to_sanitized_dict()
    del ours["accelerator_config"], theirs["accelerator_config"]
    assert _without_ours(ours) == theirs


def test_json_reads_back_as_the_dict() -> None:
    args = TrainingArguments(**GIVEN, lightning={"profiler": torch.device("cpu")})
    assert json.loads(args.to_json_string()) == {**args.to_dict(), "lightning": {"profiler": "cpu"}}


def test_tokens_are_masked_wherever_arguments_are_shown_and_stay_readable_for_the_run() -> None:
    plain = TrainingArguments(hub_token="hf_secret")
    derived = WithModelKeywords(hub_token="hf_secret", service_token="hf_secret")
    for args in (plain, derived, Seq2SeqTrainingArguments(hub_token="hf_secret")):
        for shown in (str(args), repr(args), args.to_json_string(), str(args.to_sanitized_dict())):
            assert "hf_secret" not in shown
            assert "<HUB_TOKEN>" in shown
        assert args.hub_token == "hf_secret"
    assert "<SERVICE_TOKEN>" in repr(derived)


def test_the_text_form_lists_every_argument_in_alphabetical_order_unless_a_subclass_has_its_own() -> None:
    lines = str(TrainingArguments()).splitlines()
    assert lines[0] == "TrainingArguments(" and lines[-1] == ")"
    names = [line.split("=")[0] for line in lines[1:-1]]
    assert names == sorted(field.name for field in dataclasses.fields(TrainingArguments))
    terse: Any = dataclasses.make_dataclass("Terse", [], bases=(TrainingArguments,), namespace={"__repr__": len})
    assert terse.__repr__ is len


def test_dtypes_inside_a_dict_are_named_and_the_arguments_keep_theirs() -> None:
    quantization = transformers.BitsAndBytesConfig(load_in_4bit=True)
    args = WithModelKeywords(
        model_init_kwargs={"dtype": torch.bfloat16, "deep": {"dtype": torch.float32}, "config": quantization}
    )
    assert args.to_dict()["model_init_kwargs"] == {
        "dtype": "bfloat16",
        "deep": {"dtype": "float32"},
        "config": quantization.to_dict(),
    }
    # The dict is a copy.
    assert isinstance(args.model_init_kwargs, dict)
    assert args.model_init_kwargs["dtype"] is torch.bfloat16


@pytest.mark.parametrize("wanted", [None, "some/config.json", transformers.GenerationConfig(max_length=7)])
def test_a_generation_config_is_written_as_transformers_writes_it(wanted: Any) -> None:
    settings: dict[str, Any] = {"predict_with_generate": True, "generation_config": wanted}
    theirs = transformers.Seq2SeqTrainingArguments("out", **settings).to_dict()["generation_config"]
    args = Seq2SeqTrainingArguments("out", **settings)
    assert args.to_dict()["generation_config"] == theirs
    assert json.loads(args.to_json_string())["generation_config"] == json.loads(json.dumps(theirs))
    assert args.to_sanitized_dict()["generation_config"] == str(theirs)
