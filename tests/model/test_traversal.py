from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from littrainer.model.traversal import (
    clear_gradients,
    find_model_device,
    has_method,
    list_modules,
    list_parameters,
    move_model,
    set_training_mode,
)


class Tied(nn.Module):
    """Layers with a shared weight, an empty submodule and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 3)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Dropout()), nn.BatchNorm1d(3)])
        self.first = self.blocks[0]
        self.bare = nn.Parameter(torch.ones(2))
        self.blocks[0][0].weight = self.last.weight  # type: ignore[index]
        self.register_module("nothing", None)
        self.register_parameter("no_bias", None)


class Frozen(nn.Module):
    """Module that keeps its normalisation in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.normalised = nn.BatchNorm1d(3)
        self.normalised.eval()

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.normalised.eval()
        return self


class Listing(nn.Linear):
    """Layer that overrides `named_parameters`."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        yield "weight", self.weight


def compile_model() -> nn.Module:
    return torch.compile(Tied(), backend="eager")  # type: ignore[return-value]


def script_model() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))


def make_grown_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model.append(nn.Linear(2, 2))
    model.insert(0, nn.Linear(2, 2))
    return model


MODELS: list[Callable[[], nn.Module]] = [
    Tied,
    Frozen,
    lambda: Listing(2, 2),
    lambda: nn.Sequential(Frozen(), Tied(), Listing(2, 2)),
    compile_model,
    script_model,
    make_grown_model,
]


@pytest.mark.parametrize("make", MODELS)
def test_parameters_and_modules_are_in_torchs_order(make: Callable[[], nn.Module]) -> None:
    model = make()
    expected = list(model.parameters())
    assert [id(parameter) for parameter in list_parameters(model)] == [id(parameter) for parameter in expected] != []
    assert list(map(id, list_modules(model))) == list(map(id, model.modules()))
    assert find_model_device(model) == torch.device("cpu")
    for parameter in expected:
        parameter.grad = torch.ones_like(parameter)
    clear_gradients(model)
    assert [parameter.grad for parameter in expected if parameter.grad is not None] == []


def test_methods_of_a_class_of_an_instance_and_of_a_compiled_model_are_found() -> None:
    class Sharded(nn.Linear):
        def clip_grad_norm_(self) -> None: ...

    plain, changed = nn.Linear(2, 2), nn.Linear(2, 2)
    changed.clip_grad_norm_ = len  # type: ignore[assignment]
    for model in (Sharded(2, 2), torch.compile(Sharded(2, 2)), changed, torch.compile(changed)):
        assert has_method(model, "clip_grad_norm_")
    for model in (plain, torch.compile(plain), None):
        assert not has_method(model, "clip_grad_norm_")


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("change", ["none", "all", "last"])
def test_modules_are_set_to_training_mode_as_by_torch(make: Callable[[], nn.Module], change: str) -> None:
    model, other = make(), make()
    for changed in (model, other):
        if change == "all":
            changed.eval()
        if change == "last":
            list(changed.modules())[-1].eval()
    set_training_mode(model)
    other.train()
    assert [module.training for module in model.modules()] == [module.training for module in other.modules()]


def test_an_overridden_zero_grad_is_called() -> None:
    class CustomLinear(nn.Linear):
        def zero_grad(self, set_to_none: bool = True) -> None:
            self.weight.grad = None

    model = CustomLinear(2, 2)
    assert model.bias is not None
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    clear_gradients(model)
    assert model.weight.grad is None and model.bias.grad is not None


@pytest.mark.parametrize("make", MODELS)
def test_a_model_is_moved_to_another_device(make: Callable[[], nn.Module]) -> None:
    model = make()
    move_model(model, torch.device("meta"))
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"meta"}


def test_a_module_with_an_overridden_apply_is_moved() -> None:
    class CustomLinear(nn.Linear):
        def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
            self.buffer = fn(torch.empty(1))
            return super()._apply(fn, recurse)

    inner = CustomLinear(2, 2)
    move_model(nn.Sequential(nn.Linear(2, 2), inner), torch.device("cpu"))
    assert inner.buffer.device.type == "cpu"
    patched = nn.Linear(2, 2)
    patched._apply = Mock()  # type: ignore[method-assign]
    move_model(nn.Sequential(patched), torch.device("cpu"))
    assert patched._apply.call_count == 1
