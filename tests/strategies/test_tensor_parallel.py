from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from littrainer.strategies.tensor_parallel import (
    _drop_inconsistent_ties,
    _find_tied_parameters,
    find_layer_styles,
    get_tp_plan,
)
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier, tiny_llama

PROCESSES = 2


def llama(**changes: Any) -> Any:
    return tiny_llama(**{"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, **changes})


def test_a_model_without_a_plan_is_refused_with_advice() -> None:
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
    ("model", "plan", "message"),
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
def test_indivisible_layers_and_unsuitable_styles_are_refused(model: Any, plan: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_layer_styles(model, get_tp_plan(model) if plan is None else plan, PROCESSES)


def test_rules_for_absent_layers_cause_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert find_layer_styles(VectorClassifier(), {"inner": "colwise", "outer": "rowwise"}, PROCESSES) == {
        "inner": "colwise"
    }
    assert "layers that VectorClassifier does not have: outer" in caplog.text


def test_layers_with_a_shared_weight_are_split_equally_or_not_at_all() -> None:
    model = llama(tie_word_embeddings=True)
    ties = _find_tied_parameters(model)
    assert ties == [["model.embed_tokens.weight", "lm_head.weight"]]
    equal_split = {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_rep", "other": "rowwise"}
    assert _drop_inconsistent_ties(equal_split, ties) == list(equal_split)
    for unequal_split in ({"lm_head": "colwise_rep"}, {**equal_split, "model.embed_tokens": "embedding_colwise"}):
        assert _drop_inconsistent_ties({**unequal_split, "other": "rowwise"}, ties) == ["other"]
