"""Version 1 of FSDP runs on GPUs only; what Lightning's strategy is told can be seen without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from littrainer.strategies.choice import strategy_name
from littrainer.strategies.fsdp1 import ResidentFSDP1Strategy
from tests.scenarios.models import tiny_llama
from tests.scenarios.trainers import quiet_arguments


def strategy(model: Any = None, given: Any = None, words: Any = True, **config: Any) -> Any:
    args = quiet_arguments("unused", fsdp=words, fsdp_config={"version": 1, **config}, **(given or {}))
    assert strategy_name(args) == "FSDP version 1"
    trained: Any = SimpleNamespace(args=args, model=tiny_llama() if model is None else model, optimizer=None)
    return ResidentFSDP1Strategy(trained)


def test_defaults_are_those_of_transformers() -> None:
    made = strategy()
    assert made.sharding_strategy is ShardingStrategy.FULL_SHARD and made.cpu_offload.offload_params is False
    assert made._state_dict_type == "full" and made.mixed_precision is None
    policy = made.kwargs["auto_wrap_policy"]
    assert isinstance(policy, ModuleWrapPolicy)
    assert {one.__name__ for one in policy._module_classes} == {"LlamaDecoderLayer"}
    rest = ("sync_module_states", "forward_prefetch", "backward_prefetch", "limit_all_gathers", "use_orig_params")
    assert [made.kwargs[name] for name in rest] == [True, False, None, True, True]
    assert "ignored_modules" not in made.kwargs and made._activation_checkpointing_kwargs == {}


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("backward_prefetch", "backward_pre", BackwardPrefetch.BACKWARD_PRE),
        ("backward_prefetch", "BACKWARD_POST", BackwardPrefetch.BACKWARD_POST),
        ("forward_prefetch", "true", True),
        ("limit_all_gathers", False, False),
        ("use_orig_params", False, False),
        ("sync_module_states", False, False),
    ],
)
def test_a_key_is_a_keyword_of_lightnings_strategy(name: str, value: Any, wanted: Any) -> None:
    assert strategy(**{name: value}).kwargs[name] == wanted


def test_other_keys_reach_lightnings_strategy() -> None:
    assert strategy(auto_wrap_policy="NO_WRAP").kwargs.get("auto_wrap_policy") is None
    assert strategy(min_num_params=50).kwargs["auto_wrap_policy"].keywords == {"min_num_params": 50}
    model = tiny_llama()
    assert strategy(model, ignored_modules="lm_head").kwargs["ignored_modules"] == [model.lm_head]
    assert strategy(cpu_offload=True).cpu_offload.offload_params is True
    assert strategy(state_dict_type="SHARDED_STATE_DICT")._state_dict_type == "sharded"
    recomputing = strategy(activation_checkpointing=True)
    assert recomputing._activation_checkpointing_kwargs["auto_wrap_policy"] is not None


@pytest.mark.parametrize("name", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
def test_each_sharding_strategy_is_handed_on_by_either_spelling(name: str) -> None:
    wanted = ShardingStrategy[name]
    assert strategy(words=name.lower()).sharding_strategy is wanted
    assert strategy(reshard_after_forward=name.lower()).sharding_strategy is wanted
    assert strategy(sharding_strategy=wanted.value).sharding_strategy is wanted


def test_half_precision_becomes_a_policy() -> None:
    policy = strategy(given={"bf16": True}).mixed_precision
    assert policy.param_dtype is policy.reduce_dtype is policy.buffer_dtype is torch.bfloat16


def test_weights_that_only_the_first_process_has_are_sent() -> None:
    made = strategy(cpu_ram_efficient_loading=True)
    assert made.kwargs["sync_module_states"] is True
    module = nn.Linear(2, 2, device="meta")
    made.kwargs["param_init_fn"](module)
    assert not module.weight.is_meta


def test_trained_parts_of_an_adapter_are_wrapped_each_for_itself() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    policy = strategy(model).kwargs["auto_wrap_policy"]
    assert isinstance(policy, CustomPolicy)
    wrapped = {name for name, module in model.named_modules() if policy._lambda_fn(module)}
    attention = "base_model.model.model.layers.0.self_attn.q_proj"
    assert wrapped == {
        "base_model.model.model.layers.0",
        f"{attention}.lora_A.default",
        f"{attention}.lora_B.default",
    }


def test_an_optimizer_made_beforehand_is_refused() -> None:
    args = quiet_arguments("unused", fsdp=True, fsdp_config={"version": 1})
    model = tiny_llama()
    trained: Any = SimpleNamespace(args=args, model=model, model_wrapped=model, optimizer=object())
    with pytest.raises(ValueError, match="version"):
        ResidentFSDP1Strategy(trained)
