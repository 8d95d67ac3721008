"""Averages of gradients over processes, with a simulated second process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from littrainer.strategies.model_parallel import all_reduce_gradients


@pytest.fixture
def peer_tensors(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return the second process's tensors: whether each parameter has a gradient, then its half of each mean."""
    tensors: list[torch.Tensor] = []

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **_: Any) -> Any:
        peer_tensor = tensors.pop(0)
        tensor.copy_(torch.maximum(tensor, peer_tensor) if op == dist.ReduceOp.MAX else tensor + peer_tensor)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    return tensors


def average(*gradients: float | None) -> list[float | None]:
    """Average the gradients of parameters with a single element."""
    parameters = [nn.Parameter(torch.zeros(1)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.tensor([gradient])
    all_reduce_gradients(parameters, None)
    return [None if parameter.grad is None else parameter.grad.item() for parameter in parameters]


def test_missing_gradients_count_as_zero_unless_all_processes_miss_them(
    peer_tensors: list[torch.Tensor],
) -> None:
    peer_tensors += [torch.tensor([1, 0, 0], dtype=torch.int32), torch.tensor([2.0]), torch.zeros(1), torch.zeros(1)]
    assert average(None, None, 6.0) == [2.0, None, 3.0]
