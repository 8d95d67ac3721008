from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from littrainer.model.facts import base_model, count_parameters_without_embeddings, read_model_facts
from tests.scenarios.models import (
    KeywordClassifier,
    VectorClassifier,
    tiny_bert_classifier,
    tiny_bert_config,
    tiny_bert_for_masked_tokens,
    tiny_gpt2,
    tiny_lora_tagger,
)
from tests.scenarios.trainers import quiet_arguments


class DecliningClassifier(KeywordClassifier):
    accepts_loss_kwargs = False


class ClaimingClassifier(VectorClassifier):
    accepts_loss_kwargs = True


class TwoLabels(nn.Module):
    def forward(self, label_a: Any, x: Any, my_labels: Any = None, start_positions: Any = None) -> None: ...


class OwnQuestionAnswering(nn.Module):
    def forward(self, x: Any, start_positions: Any = None, end_positions: Any = None) -> None: ...


class Contrastive(nn.Module):
    def forward(self, x: Any, return_loss: bool = True) -> None: ...


class ContrastiveWhereAsked(nn.Module):
    def forward(self, x: Any, return_loss: bool = False) -> None: ...


def tiny_t5() -> Any:
    config = transformers.T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    return transformers.T5ForConditionalGeneration(config)


def tiny_llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "vectors": VectorClassifier,
    "keywords": KeywordClassifier,
    "declining": DecliningClassifier,
    "claiming": ClaimingClassifier,
    "two labels": TwoLabels,
    "own question answering": OwnQuestionAnswering,
    "contrastive": Contrastive,
    "contrastive where asked": ContrastiveWhereAsked,
    "bert classifier": tiny_bert_classifier,
    "bert masked": tiny_bert_for_masked_tokens,
    "bert questions": lambda: transformers.BertForQuestionAnswering(tiny_bert_config()),
    "gpt2": tiny_gpt2,
    "llama": tiny_llama,
    "t5": tiny_t5,
}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())
def test_facts_are_those_that_transformers_trainer_reads(tmp_path: Path, build: Callable[[], nn.Module]) -> None:
    model = build()
    args = quiet_arguments(tmp_path, transformers.TrainingArguments)
    theirs = transformers.Trainer(model=model, args=args)
    facts = read_model_facts(model)
    assert facts.label_names == theirs.label_names
    assert facts.accepts_loss_kwargs == theirs.model_accepts_loss_kwargs
    assert facts.can_return_loss == theirs.can_return_loss
    assert facts.shifts_labels == theirs._loss_shifts_labels


def test_an_adapter_is_looked_through() -> None:
    adapted = tiny_lora_tagger()
    assert base_model(adapted) is adapted.base_model.model and base_model(base_model(adapted)) is base_model(adapted)
    assert read_model_facts(adapted) == read_model_facts(base_model(adapted))


def test_parameters_that_deepspeed_has_sharded_count_in_whole() -> None:
    model: Any = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 4))
    model.num_parameters = lambda exclude_embeddings: 12
    assert count_parameters_without_embeddings(model) == 12
    for parameter in model.parameters():
        parameter.ds_numel = parameter.numel()
        parameter.data = torch.empty(0)
    assert count_parameters_without_embeddings(model) == 2 * 4 + 4
