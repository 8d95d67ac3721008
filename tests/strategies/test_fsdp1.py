"""FSDP1 needs GPUs; the arguments of Lightning's strategy are tested without a GPU."""

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


def create_strategy(
    model: Any = None, fsdp: Any = True, bf16: bool = False, optimizer: Any = None, **config: Any
) -> Any:
    args = quiet_arguments("unused", fsdp=fsdp, bf16=bf16, fsdp_config={"version": 1, **config})
    assert strategy_name(args) == "FSDP version 1"
    model = tiny_llama() if model is None else model
    trained: Any = SimpleNamespace(args=args, model=model, model_wrapped=model, optimizer=optimizer)
    return ResidentFSDP1Strategy(trained)


def test_defaults_are_those_of_transformers() -> None:
    strategy = create_strategy()
    assert strategy.sharding_strategy is ShardingStrategy.FULL_SHARD and strategy.cpu_offload.offload_params is False
    assert strategy._state_dict_type == "full" and strategy.mixed_precision is None
    policy = strategy.kwargs["auto_wrap_policy"]
    assert isinstance(policy, ModuleWrapPolicy)
    assert {kind.__name__ for kind in policy._module_classes} == {"LlamaDecoderLayer"}
    rest = ("sync_module_states", "forward_prefetch", "backward_prefetch", "limit_all_gathers", "use_orig_params")
    assert [strategy.kwargs[name] for name in rest] == [True, False, None, True, True]
    assert "ignored_modules" not in strategy.kwargs and strategy._activation_checkpointing_kwargs == {}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("backward_prefetch", "backward_pre", BackwardPrefetch.BACKWARD_PRE),
        ("backward_prefetch", "BACKWARD_POST", BackwardPrefetch.BACKWARD_POST),
        ("forward_prefetch", "true", True),
        ("limit_all_gathers", False, False),
        ("use_orig_params", False, False),
        ("sync_module_states", False, False),
    ],
)
def test_a_key_is_a_keyword_of_lightnings_strategy(name: str, value: Any, expected: Any) -> None:
    assert create_strategy(**{name: value}).kwargs[name] == expected


def test_other_keys_are_passed_to_lightnings_strategy() -> None:
    assert create_strategy(auto_wrap_policy="NO_WRAP").kwargs.get("auto_wrap_policy") is None
    assert create_strategy(min_num_params=50).kwargs["auto_wrap_policy"].keywords == {"min_num_params": 50}
    model = tiny_llama()
    assert create_strategy(model, ignored_modules="lm_head").kwargs["ignored_modules"] == [model.lm_head]
    assert create_strategy(cpu_offload=True).cpu_offload.offload_params is True
    assert create_strategy(state_dict_type="SHARDED_STATE_DICT")._state_dict_type == "sharded"
    checkpointing = create_strategy(activation_checkpointing=True)
    assert checkpointing._activation_checkpointing_kwargs["auto_wrap_policy"] is not None
    policy = create_strategy(bf16=True).mixed_precision
    assert policy.param_dtype is policy.reduce_dtype is policy.buffer_dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
def test_each_sharding_strategy_has_several_spellings(name: str) -> None:
    expected = ShardingStrategy[name]
    assert create_strategy(fsdp=name.lower()).sharding_strategy is expected
    assert create_strategy(reshard_after_forward=name.lower()).sharding_strategy is expected
    assert create_strategy(sharding_strategy=expected.value).sharding_strategy is expected


def test_weights_of_the_first_process_are_broadcast() -> None:
    strategy = create_strategy(cpu_ram_efficient_loading=True)
    assert strategy.kwargs["sync_module_states"] is True
    module = nn.Linear(2, 2, device="meta")
    strategy.kwargs["param_init_fn"](module)
    assert not module.weight.is_meta


def test_trained_modules_of_an_adapter_are_wrapped_separately() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    policy = create_strategy(model).kwargs["auto_wrap_policy"]
    assert isinstance(policy, CustomPolicy)
    wrapped = {name for name, module in model.named_modules() if policy._lambda_fn(module)}
    attention = "base_model.model.model.layers.0.self_attn.q_proj"
    assert wrapped == {
        "base_model.model.model.layers.0",
        f"{attention}.lora_A.default",
        f"{attention}.lora_B.default",
    }


def test_an_existing_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="version"):
        create_strategy(optimizer=object())
