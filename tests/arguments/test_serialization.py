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

KEYWORDS: dict[str, Any] = {
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


def drop_additional(values: dict[str, Any]) -> dict[str, Any]:
    for name in ONLY_OURS:
        del values[name]
    return values


@pytest.mark.parametrize("keywords", [{}, KEYWORDS], ids=["defaults", "keywords"])
def test_the_dict_equals_that_of_transformers(keywords: dict[str, Any]) -> None:
    ours, theirs = TrainingArguments(**keywords).to_dict(), transformers.TrainingArguments(**keywords).to_dict()
    assert drop_additional(ours) == theirs
    assert list(ours) == list(theirs)
    assert {type(value) for value in ours.values()} == {type(value) for value in theirs.values()}


def test_the_sanitized_dict_equals_that_of_transformers() -> None:
    ours = TrainingArguments(**KEYWORDS).to_sanitized_dict()
    theirs = transformers.TrainingArguments(**KEYWORDS).to_sanitized_dict()
    del ours["accelerator_config"], theirs["accelerator_config"]
    assert drop_additional(ours) == theirs


def test_parsed_json_equals_the_dict() -> None:
    args = TrainingArguments(**KEYWORDS, lightning={"profiler": torch.device("cpu")})
    assert json.loads(args.to_json_string()) == {**args.to_dict(), "lightning": {"profiler": "cpu"}}


def test_tokens_are_masked_in_texts_and_dicts_only() -> None:
    plain = TrainingArguments(hub_token="hf_secret")
    derived = WithModelKeywords(hub_token="hf_secret", service_token="hf_secret")
    for args in (plain, derived, Seq2SeqTrainingArguments(hub_token="hf_secret")):
        for shown in (str(args), repr(args), args.to_json_string(), str(args.to_sanitized_dict())):
            assert "hf_secret" not in shown
            assert "<HUB_TOKEN>" in shown
        assert args.hub_token == "hf_secret"
    assert "<SERVICE_TOKEN>" in repr(derived)


def test_the_text_lists_every_argument_alphabetically_unless_a_subclass_overrides_it() -> None:
    lines = str(TrainingArguments()).splitlines()
    assert lines[0] == "TrainingArguments(" and lines[-1] == ")"
    names = [line.split("=")[0] for line in lines[1:-1]]
    assert names == sorted(field.name for field in dataclasses.fields(TrainingArguments))
    terse: Any = dataclasses.make_dataclass("Terse", [], bases=(TrainingArguments,), namespace={"__repr__": len})
    assert terse.__repr__ is len


def test_dtypes_in_dicts_are_converted_to_names_in_a_copy() -> None:
    quantization = transformers.BitsAndBytesConfig(load_in_4bit=True)
    args = WithModelKeywords(
        model_init_kwargs={"dtype": torch.bfloat16, "deep": {"dtype": torch.float32}, "config": quantization}
    )
    assert args.to_dict()["model_init_kwargs"] == {
        "dtype": "bfloat16",
        "deep": {"dtype": "float32"},
        "config": quantization.to_dict(),
    }
    assert isinstance(args.model_init_kwargs, dict)
    assert args.model_init_kwargs["dtype"] is torch.bfloat16


@pytest.mark.parametrize("config", [None, "some/config.json", transformers.GenerationConfig(max_length=7)])
def test_a_generation_config_is_serialized_as_in_transformers(config: Any) -> None:
    settings: dict[str, Any] = {"predict_with_generate": True, "generation_config": config}
    theirs = transformers.Seq2SeqTrainingArguments("out", **settings).to_dict()["generation_config"]
    args = Seq2SeqTrainingArguments("out", **settings)
    assert args.to_dict()["generation_config"] == theirs
    assert json.loads(args.to_json_string())["generation_config"] == json.loads(json.dumps(theirs))
    assert args.to_sanitized_dict()["generation_config"] == str(theirs)
