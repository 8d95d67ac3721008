from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from littrainer.strategies.tensor_parallel import (
    _ties,
    _without_ties_that_would_break,
    plan_of,
    styles_by_layer,
)
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier, tiny_llama

PROCESSES = 2


def llama(**changes: Any) -> Any:
    return tiny_llama(**{"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, **changes})


def test_wildcards_stand_for_the_numbers_of_layers() -> None:
    model = llama()
    styles = styles_by_layer(model, plan_of(model), PROCESSES)
    for number in range(2):
        layer = f"model.layers.{number}"
        assert styles[f"{layer}.self_attn.q_proj"] == styles[f"{layer}.mlp.up_proj"] == "colwise"
        assert styles[f"{layer}.self_attn.o_proj"] == styles[f"{layer}.mlp.down_proj"] == "rowwise"
    assert styles["lm_head"] == "colwise_gather_output"
    assert not any("norm" in name for name in styles)


def test_a_model_without_a_plan_is_refused_with_what_to_do() -> None:
    for model in (VectorClassifier(), tiny_bert_classifier()):
        with pytest.raises(
            ValueError,
            match=rf"tp_size above 1, and {type(model).__name__} has no plan.*tp_plan.*fsdp .*tensor_parallel_size=1",
        ):
            plan_of(model)


def test_a_model_with_adapters_is_refused() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"adapters .*PeftModel.* have no plan"):
        plan_of(model)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_key_value_heads": 1}, "num_key_value_heads=1"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 12}, "num_attention_heads=3"),
    ],
)
def test_heads_that_do_not_divide_are_refused_with_both_numbers(changes: dict[str, int], named: str) -> None:
    model = llama(**changes)
    with pytest.raises(ValueError, match=rf"tp_size=2, which does not divide the {named} of LlamaForCausalLM"):
        styles_by_layer(model, plan_of(model), PROCESSES)


def test_a_layer_whose_features_do_not_divide_is_refused_by_name() -> None:
    model = llama(intermediate_size=25)
    with pytest.raises(ValueError, match=r"does not divide the out_features=25 of model\.layers\.0\.mlp\.gate_proj"):
        styles_by_layer(model, plan_of(model), PROCESSES)
    with pytest.raises(ValueError, match=r"does not divide the in_features=25 of down"):
        styles_by_layer(nn.ModuleDict({"down": nn.Linear(25, 4)}), {"down": "rowwise"}, PROCESSES)


@pytest.mark.parametrize("plan", [{"inner": "packed_colwise"}, {"inner.weight": "grouped_gemm"}])
def test_an_unknown_style_is_refused_with_the_way_that_transformers_offers(plan: dict[str, str]) -> None:
    with pytest.raises(
        ValueError, match=r"inner.* by the style '\w+', and littrainer knows colwise.*DistributedConfig"
    ):
        styles_by_layer(VectorClassifier(), plan, PROCESSES)


def test_a_style_for_another_kind_of_layer_is_refused() -> None:
    with pytest.raises(
        ValueError, match="splits norm by the style 'colwise', which is for Linear, and it is a LayerNorm"
    ):
        styles_by_layer(VectorClassifier(), {"norm": "colwise"}, PROCESSES)


def test_rules_for_layers_that_are_not_there_are_told(caplog: pytest.LogCaptureFixture) -> None:
    assert styles_by_layer(VectorClassifier(), {"inner": "colwise", "outer": "rowwise"}, PROCESSES) == {
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
