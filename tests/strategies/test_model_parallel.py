"""Averages of gradients over processes; here there is one, which plays the others too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from littrainer.strategies.model_parallel import all_reduce_gradients


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What the other process gives: for each parameter whether it has a gradient, then its half of each mean."""
    given: list[torch.Tensor] = []

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **_: Any) -> Any:
        other = given.pop(0)
        tensor.copy_(torch.maximum(tensor, other) if op == dist.ReduceOp.MAX else tensor + other)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    return given


def averaged(*gradients: float | None) -> list[float | None]:
    """Gradients of parameters with one number, averaged."""
    parameters = [nn.Parameter(torch.zeros(1)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.tensor([gradient])
    all_reduce_gradients(parameters, None)
    return [None if one.grad is None else one.grad.item() for one in parameters]


def test_a_parameter_that_one_process_left_out_counts_as_zero_there_and_one_that_all_did_has_no_gradient(
    others: list[torch.Tensor],
) -> None:
    others += [torch.tensor([1, 0, 0], dtype=torch.int32), torch.tensor([2.0]), torch.zeros(1), torch.zeros(1)]
    assert averaged(None, None, 6.0) == [2.0, None, 3.0]
