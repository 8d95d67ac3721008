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
    list_modules,
    list_parameters,
    move_model,
    set_training_mode,
)


class Tied(nn.Module):
    """Two layers that share a weight, in an order of their own, beside an empty place and a bare parameter."""

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
    """Keeps its normalisation in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.normalised = nn.BatchNorm1d(3)
        self.normalised.eval()

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.normalised.eval()
        return self


class Listing(nn.Linear):
    """Says itself what its parameters are."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        yield "weight", self.weight


def compiled() -> nn.Module:
    return torch.compile(Tied(), backend="eager")  # type: ignore[return-value]


def in_script() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))


def lazy_and_grown() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model.append(nn.Linear(2, 2))
    model.insert(0, nn.Linear(2, 2))
    return model


MODELS: list[Callable[[], nn.Module]] = [
    Tied, Frozen, lambda: Listing(2, 2), lambda: nn.Sequential(Frozen(), Tied(), Listing(2, 2)), compiled, in_script,
    lazy_and_grown,
]  # fmt: skip


@pytest.mark.parametrize("make", MODELS)
def test_parameters_and_modules_are_those_of_the_model_in_their_order(make: Callable[[], nn.Module]) -> None:
    model = make()
    expected = list(model.parameters())
    assert [id(one) for one in list_parameters(model)] == [id(one) for one in expected] != []
    assert list(map(id, list_modules(model))) == list(map(id, model.modules()))
    assert find_model_device(model) == torch.device("cpu")
    for one in expected:
        one.grad = torch.ones_like(one)
    clear_gradients(model)
    assert [one.grad for one in expected if one.grad is not None] == []


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("change", ["none", "all", "one"])
def test_modules_are_in_the_mode_that_torch_leaves_them_in(make: Callable[[], nn.Module], change: str) -> None:
    model, other = make(), make()
    for changed in (model, other):
        if change == "all":
            changed.eval()
        if change == "one":
            list(changed.modules())[-1].eval()
    set_training_mode(model)
    other.train()
    assert [module.training for module in model.modules()] == [module.training for module in other.modules()]


def test_a_models_own_zero_grad_is_called() -> None:
    class Keeping(nn.Linear):
        def zero_grad(self, set_to_none: bool = True) -> None:
            self.weight.grad = None

    model = Keeping(2, 2)
    assert model.bias is not None
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    clear_gradients(model)
    assert model.weight.grad is None and model.bias.grad is not None


@pytest.mark.parametrize("make", MODELS)
def test_a_model_is_moved_to_a_device_on_which_it_is_not(make: Callable[[], nn.Module]) -> None:
    model = make()
    move_model(model, torch.device("meta"))
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"meta"}


def test_a_module_that_moves_something_of_its_own_is_moved_with_the_model() -> None:
    class Keeping(nn.Linear):
        def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
            self.kept = fn(torch.empty(1))
            return super()._apply(fn, recurse)

    inner = Keeping(2, 2)
    move_model(nn.Sequential(nn.Linear(2, 2), inner), torch.device("cpu"))
    assert inner.kept.device.type == "cpu"
    of_the_instance = nn.Linear(2, 2)
    of_the_instance._apply = Mock()  # type: ignore[method-assign]
    move_model(nn.Sequential(of_the_instance), torch.device("cpu"))
    assert of_the_instance._apply.call_count == 1
