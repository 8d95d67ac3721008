from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from littrainer.strategies.tensor_parallel import (
    _ties,
    _without_ties_that_would_break,
    find_layer_styles,
    get_tp_plan,
)
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier, tiny_llama

PROCESSES = 2


def llama(**changes: Any) -> Any:
    return tiny_llama(**{"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, **changes})


def test_a_model_without_a_plan_is_refused_with_what_to_do() -> None:
    for model in (VectorClassifier(), tiny_bert_classifier()):
        with pytest.raises(
            ValueError,
            match=rf"tp_size above 1, and {type(model).__name__} has no plan.*tp_plan.*fsdp .*tensor_parallel_size=1",
        ):
            get_tp_plan(model)


def test_a_model_with_adapters_is_refused() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"adapters .*PeftModel.* have no plan"):
        get_tp_plan(model)


@pytest.mark.parametrize(
    ("model", "plan", "words"),
    [
        (llama(num_key_value_heads=1), {}, "does not divide the num_key_value_heads=1 of LlamaForCausalLM"),
        (
            llama(num_attention_heads=3, num_key_value_heads=3, hidden_size=12),
            {},
            "tp_size=2, which does not divide the num_attention_heads=3",
        ),
        (llama(intermediate_size=25), None, r"the out_features=25 of model\.layers\.0\.mlp\.gate_proj"),
        (nn.ModuleDict({"down": nn.Linear(25, 4)}), {"down": "rowwise"}, "the in_features=25 of down"),
        (VectorClassifier(), {"inner": "packed_colwise"}, r"inner by the style '\w+', .* knows .*DistributedConfig"),
        (VectorClassifier(), {"inner.weight": "grouped_gemm"}, r"inner.weight by the style '\w+', .* knows colwise"),
        (VectorClassifier(), {"norm": "colwise"}, "norm by the style 'colwise', which is for Linear, .* a LayerNorm"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(model: Any, plan: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        find_layer_styles(model, get_tp_plan(model) if plan is None else plan, PROCESSES)


def test_rules_for_layers_that_are_not_there_are_told(caplog: pytest.LogCaptureFixture) -> None:
    assert find_layer_styles(VectorClassifier(), {"inner": "colwise", "outer": "rowwise"}, PROCESSES) == {
        "inner": "colwise"
    }
    assert "layers that VectorClassifier does not have: outer" in caplog.text


def test_layers_that_share_a_weight_are_split_alike_or_not_at_all() -> None:
    model = llama(tie_word_embeddings=True)
    ties = _ties(model)
    assert ties == [["model.embed_tokens.weight", "lm_head.weight"]]
    alike = {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_rep", "other": "rowwise"}
    assert _without_ties_that_would_break(alike, ties) == list(alike)
    for head_alone in ({"lm_head": "colwise_rep"}, {**alike, "model.embed_tokens": "embedding_colwise"}):
        kept = _without_ties_that_would_break({**head_alone, "other": "rowwise"}, ties)
        assert kept == ["other"]
