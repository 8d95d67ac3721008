from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from littrainer.optim.parameter_groups import decayed_parameter_names, parameter_groups
from tests.scenarios.models import (
    PartlyTrainedClassifier,
    VectorClassifier,
    tiny_bert_classifier,
    tiny_bert_for_masked_tokens,
    tiny_gpt2,
)


def tiny_llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=20,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


def tiny_t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )


class OddlyNamed(nn.Module):
    """Names that hold `norm` or `bias` in every position."""

    NAMES = (
        "norm",
        "norms",
        "prenorm",
        "q_norm",
        "norm_q",
        "normalizer",
        "LayerNorm2",
        "rmsnorm_in",
        "NORM",
        "BiasGate",
        "unbiased",
        "enormous",
    )

    def __init__(self) -> None:
        super().__init__()
        for name in self.NAMES:
            self.add_module(name, nn.Linear(2, 2))
            self.register_parameter(f"own_{name}", nn.Parameter(torch.zeros(1)))
        self.inside = nn.ModuleDict(
            {"norm": nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), "batch": nn.GroupNorm(1, 2)}
        )
        self.nothing = None
        self.register_parameter("absent", None)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "vectors": VectorClassifier,
    "bert": tiny_bert_classifier,
    "bert with tied weights": tiny_bert_for_masked_tokens,
    "gpt2": tiny_gpt2,
    "llama": tiny_llama,
    "t5": tiny_t5,
    "odd names": OddlyNamed,
    "a bare norm": lambda: nn.LayerNorm(3),
    "a bare parameter list": lambda: nn.ParameterList([torch.zeros(1), torch.zeros(2)]),
    "no parameters": nn.Identity,
}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())
def test_the_names_are_those_that_transformers_decays_in_its_order(build: Callable[[], nn.Module]) -> None:
    model = build()
    owner: Any = None
    assert decayed_parameter_names(model) == transformers.Trainer.get_decay_parameter_names(owner, model)


def test_a_name_in_capitals_is_exempt_too() -> None:
    names = decayed_parameter_names(OddlyNamed())
    assert "own_enormous" in names and "norms.weight" in names
    assert not {"own_BiasGate", "NORM.weight", "LayerNorm2.weight", "inside.norm.0.weight"} & set(names)


def test_groups_keep_the_models_order_and_leave_out_what_is_frozen() -> None:
    model = PartlyTrainedClassifier()
    decayed, exempt = parameter_groups(model, decayed_parameter_names(model)[::-1], weight_decay=0.1)
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [names[id(parameter)] for parameter in decayed["params"]] == ["head.weight", "unused.weight"]
    assert [names[id(parameter)] for parameter in exempt["params"]] == [
        "norm.weight",
        "norm.bias",
        "head.bias",
        "unused.bias",
    ]


def test_weights_shared_by_two_layers_stand_in_one_group_once() -> None:
    model = tiny_gpt2()
    groups = parameter_groups(model, decayed_parameter_names(model), weight_decay=0.1)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())
