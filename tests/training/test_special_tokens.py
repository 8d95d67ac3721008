from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.trainer_utils import align_special_tokens as their_alignment

from littrainer.training.special_tokens import align_special_tokens
from tests.scenarios.data import tiny_tokenizer
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier, tiny_gpt2

TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id")

# What the tokenizer has, what the model's config has, what its generation config has.
CASES: list[tuple[dict[str, str], dict[str, Any], dict[str, Any]]] = [
    ({}, {}, {}),
    ({"eos_token": "[SEP]", "bos_token": "[CLS]"}, {}, {}),
    ({"eos_token": "[SEP]"}, {"eos_token_id": 3}, {"eos_token_id": 3}),
    ({"eos_token": "[SEP]"}, {"eos_token_id": 3}, {"eos_token_id": 7}),
    ({"eos_token": "[SEP]"}, {"eos_token_id": 7}, {"eos_token_id": [3, 7]}),
    ({"eos_token": "[SEP]"}, {"eos_token_id": [7, 3]}, {"eos_token_id": [7, 8]}),
    ({"eos_token": "[SEP]"}, {"eos_token_id": None, "pad_token_id": None}, {"eos_token_id": None}),
    ({"bos_token": "[CLS]"}, {"bos_token_id": 9}, {"bos_token_id": 9}),
]


def model_with(config: dict[str, Any], generation: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = tiny_gpt2()
    for name, value in config.items():
        setattr(model.config, name, value)
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    return model


def tokens_of(model: Any) -> list[Any]:
    return [getattr(place, name) for place in (model.config, model.generation_config) for name in TOKENS]


@pytest.mark.parametrize(("tokenizer", "config", "generation"), CASES, ids=range(len(CASES)))
def test_configs_get_the_special_tokens_that_transformers_gives_them(
    tokenizer: dict[str, str], config: dict[str, Any], generation: dict[str, Any]
) -> None:
    processing_class = tiny_tokenizer()
    for name, value in tokenizer.items():
        setattr(processing_class, name, value)
    ours, theirs = model_with(config, generation), model_with(copy.deepcopy(config), copy.deepcopy(generation))
    align_special_tokens(ours, processing_class)
    their_alignment(theirs, processing_class)
    assert tokens_of(ours) == tokens_of(theirs)


def test_a_change_is_announced_and_agreement_is_not(caplog: pytest.LogCaptureFixture) -> None:
    model = model_with({}, {})
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "[SEP]"
    align_special_tokens(model, tokenizer)
    assert "eos_token_id" in caplog.text
    caplog.clear()
    align_special_tokens(model, tokenizer)
    assert caplog.records == []


@pytest.mark.parametrize("processing_class", [None, object()])
def test_without_a_tokenizer_a_config_stays_as_it_is(processing_class: Any) -> None:
    model = model_with({}, {})
    before = tokens_of(model)
    align_special_tokens(model, processing_class)
    assert tokens_of(model) == before


def test_a_model_without_configs_is_left_alone() -> None:
    align_special_tokens(VectorClassifier(), tiny_tokenizer())
    model = tiny_bert_classifier()
    align_special_tokens(model, tiny_tokenizer())
    assert model.config.pad_token_id == 0
