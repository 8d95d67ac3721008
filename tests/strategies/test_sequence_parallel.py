from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from littrainer.strategies.sequence_parallel import cut_sequences, find_conflicts, find_unsupported, wrap_attention
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier, tiny_gpt2, tiny_llama, tiny_t5
from tests.scenarios.trainers import quiet_arguments

PROCESSES = 2


def llama(**changes: Any) -> Any:
    return tiny_llama(**{"num_attention_heads": 4, "num_key_value_heads": 2, **changes})


def find_reasons(model: Any, gathers_keys: bool = False) -> list[str]:
    return list(find_unsupported(model, PROCESSES, gathers_keys))


@pytest.mark.parametrize("make_model", [VectorClassifier, tiny_bert_classifier, tiny_t5])
def test_models_that_do_not_predict_the_next_token_are_refused(make_model: Any) -> None:
    model = make_model()
    (reason,) = find_reasons(model)
    assert reason.startswith(f"{type(model).__name__} is no language model of transformers that predicts each token")


def test_language_models_of_transformers_are_accepted() -> None:
    for model in (llama(), llama(attn_implementation="eager"), tiny_gpt2()):
        assert find_reasons(model) == find_reasons(model, gathers_keys=True) == []


def test_heads_that_do_not_divide_are_refused_unless_keys_are_gathered() -> None:
    model = llama(num_attention_heads=3, num_key_value_heads=1, hidden_size=12)
    of_queries, of_keys = find_reasons(model)
    assert "2 does not divide the num_attention_heads=3" in of_queries and "num_key_value_heads=1" in of_keys
    assert find_reasons(model, gathers_keys=True) == []


def test_attention_that_is_not_registered_is_refused() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=40, hidden_size=16, n_layer=1, n_head=4))
    assert "BloomForCausalLM does not call its attention (eager) by transformers' AttentionInterface" in find_reasons(
        model
    )
    model = llama()
    model.config._attn_implementation = "unknown"
    assert "does not call its attention (unknown)" in find_reasons(model)[0]


def test_outputs_that_are_not_joined_and_prompt_tuning_are_refused() -> None:
    (reason,) = find_reasons(llama(output_hidden_states=True))
    assert "output_hidden_states=True, so set it to False" in reason
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))
    assert find_reasons(adapted) == []
    tuned = peft.get_peft_model(llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert find_reasons(tuned) == ["the adapter adds virtual tokens to each row"]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"fsdp": True, "fsdp_config": {"version": 1}}, "fsdp_config with version 1"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"torch_compile": True}, "torch_compile"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"auto_micro_batch": True}, "auto_micro_batch"),
    ],
)
def test_arguments_that_need_full_rows_are_refused_by_name(tmp_path: Path, changes: Any, name: str) -> None:
    assert list(find_conflicts(quiet_arguments(tmp_path))) == []
    (reason,) = find_conflicts(quiet_arguments(tmp_path, **changes))
    assert name in reason


def test_a_wrapped_attention_function_is_unchanged_for_other_models() -> None:
    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float) -> Any:
        return query * scaling, attention_mask

    wrapped = wrap_attention(attend)
    assert wrap_attention(wrapped) is wrapped
    query, mask = torch.ones(2), object()
    output, returned = wrapped(None, query, query, query, mask, scaling=3.0)
    assert output.tolist() == [3.0, 3.0] and returned is mask


def test_without_a_layout_a_model_has_no_hooks(tmp_path: Path) -> None:
    model, holder = llama(), SimpleNamespace(sequences=None)
    with cut_sequences(holder, quiet_arguments(tmp_path), model, gathers_logits=False):
        assert holder.sequences is None and not model._forward_pre_hooks and not model._forward_hooks
