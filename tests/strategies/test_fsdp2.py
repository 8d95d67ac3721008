from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from littrainer.arguments.sharding import get_sharding_plan
from littrainer.strategies.fsdp2 import (
    checkpoint_activations,
    find_ignored_parameters,
    find_units,
    find_wrapped_layers,
    get_fully_shard_keywords,
)
from tests.scenarios.models import VectorClassifier, tiny_llama, tiny_t5
from tests.scenarios.trainers import quiet_arguments


def create_plan(**config: Any) -> Any:
    return get_sharding_plan(quiet_arguments("unused", fsdp=True, fsdp_config=config))


def unit_names(model: nn.Module, **config: Any) -> list[tuple[tuple[str, ...], bool]]:
    names = {id(module): name for name, module in model.named_modules()}
    return [
        (tuple(names[id(module)] for module in unit.modules), unit.reshards)
        for unit in find_units(model, create_plan(**config))
    ]


def test_layers_embedding_and_head_are_units() -> None:
    model = tiny_llama(num_hidden_layers=2, tie_word_embeddings=False)
    assert unit_names(model) == [
        (("model.layers.0",), True),
        (("model.layers.1",), True),
        (("model.embed_tokens",), True),
        (("model.norm", "lm_head"), False),
    ]


def test_shared_weights_are_in_a_single_unit() -> None:
    assert unit_names(tiny_llama(tie_word_embeddings=True)) == [(("model.layers.0",), True)]
    for model in (tiny_t5(), tiny_llama(tie_word_embeddings=True)):
        holders: dict[int, set[int]] = {}
        for number, unit in enumerate(find_units(model, create_plan(min_num_params=10))):
            for module in unit.modules:
                for submodule in module.modules():
                    for parameter in submodule._parameters.values():
                        holders.setdefault(id(parameter), set()).add(number)
        shared = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
        assert not shared & holders.keys()


def test_modules_are_chosen_by_the_size_of_their_remaining_parameters() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.ModuleList([nn.Linear(9, 9)])
    )
    assert unit_names(model, min_num_params=12) == [(("0",), True), (("1",), True), (("2.0",), True)]


def test_named_classes_are_units_and_absent_classes_are_refused() -> None:
    model = VectorClassifier()
    assert unit_names(model, transformer_layer_cls_to_wrap="Linear,LayerNorm") == [
        (("inner",), True),
        (("norm",), True),
        (("head",), True),
    ]
    with pytest.raises(ValueError, match="did you mean 'LayerNorm'"):
        unit_names(model, transformer_layer_cls_to_wrap="LayerNorn")
    assert unit_names(model, auto_wrap_policy="NO_WRAP") == unit_names(model) == []


def test_ignored_modules_match_by_full_names() -> None:
    model = VectorClassifier()
    assert find_ignored_parameters(model, "inner|norm") == {*model.inner.parameters(), *model.norm.parameters()}
    with pytest.raises(ValueError, match="matches the whole name of no module"):
        find_ignored_parameters(model, "inn")
    with pytest.raises(ValueError, match="no regular expression"):
        find_ignored_parameters(model, "(")


GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def keywords(device: torch.device = GPU, dtype: Any = None, **config: Any) -> dict[str, Any]:
    mesh: Any = "mesh"
    return get_fully_shard_keywords(VectorClassifier(), create_plan(**config), mesh, device, dtype)


def test_the_plan_becomes_keywords_of_fully_shard() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    plain = keywords()
    assert plain["mesh"] == "mesh" and plain["reshard_after_forward"] is True and "ignored_params" not in plain
    assert not isinstance(plain["offload_policy"], CPUOffloadPolicy) and plain["mp_policy"].param_dtype is None
    assert keywords(reshard_after_forward=False)["reshard_after_forward"] is False
    assert isinstance(keywords(cpu_offload=True)["offload_policy"], CPUOffloadPolicy)
    # There is nothing to offload from.
    assert not isinstance(keywords(CPU, cpu_offload=True)["offload_policy"], CPUOffloadPolicy)
    assert len(keywords(ignored_modules="inner")["ignored_params"]) == 2
    policy = keywords(dtype=torch.bfloat16)["mp_policy"]
    assert policy.param_dtype is policy.reduce_dtype is torch.bfloat16
    # The loss is not rounded.
    assert policy.output_dtype is None


@pytest.mark.parametrize("offloads", [False, True])
def test_checkpointed_layers_repeat_their_dropout(offloads: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    runs = 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    layer[0].register_forward_hook(count)
    x = torch.ones(2, 4, requires_grad=True)
    torch.manual_seed(1)
    layer(x).sum().backward()
    expected, x.grad = x.grad, None
    assert expected is not None
    plan = create_plan(activation_checkpointing=True, activation_checkpointing_offload=offloads, min_num_params=1)
    checkpoint_activations([layer], plan)
    checkpoint_activations([layer], plan)
    torch.manual_seed(1)
    layer(x).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, expected) and runs == 3
    with torch.no_grad():
        layer(x)
    assert runs == 4


def test_activation_checkpointing_needs_layers() -> None:
    with pytest.raises(ValueError, match="no layer is wrapped"):
        checkpoint_activations(
            find_wrapped_layers(VectorClassifier(), create_plan()), create_plan(activation_checkpointing=True)
        )
