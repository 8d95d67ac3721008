"""Copies of states in host memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from littrainer.checkpoint.host_copies import HostCopies


def test_a_copy_keeps_values_containers_and_what_is_no_tensor() -> None:
    model = nn.Linear(3, 2)
    states = {"model": model.state_dict(), "rest": [1, "text", (None, torch.arange(3)), {"lr": 0.1}]}
    copied = HostCopies().copy(states)
    with torch.no_grad():
        model.weight.zero_()
    assert isinstance(copied["model"], OrderedDict) and copied["model"]._metadata == model.state_dict()._metadata
    assert copied["model"]["weight"].abs().sum() > 0
    assert copied["rest"][:2] == [1, "text"] and copied["rest"][3] == {"lr": 0.1}
    assert copied["rest"][2][0] is None and copied["rest"][2][1].tolist() == [0, 1, 2]


def test_what_shares_memory_shares_it_in_the_copy_too() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    states = {"one": whole, "tied": whole, "column": whole[:, 1], "turned": whole.t(), "other": whole.clone()}
    copied = HostCopies().copy(states)
    for name, tensor in states.items():
        assert torch.equal(copied[name], tensor) and copied[name].stride() == tensor.stride()
    memory = {name: tensor.untyped_storage().data_ptr() for name, tensor in copied.items()}
    assert memory["one"] == memory["tied"] == memory["column"] == memory["turned"] != memory["other"]
    whole.zero_()
    assert copied["column"].tolist() == [1.0, 5.0, 9.0]


TENSORS: dict[str, torch.Tensor] = {
    "no elements": torch.empty(0, 3),
    "a number": torch.tensor(2.5),
    "bfloat16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
    "sparse": torch.eye(3).to_sparse(),
    "complex, conjugated": torch.tensor([1 + 2j]).conj(),
    "a view with an offset": torch.arange(10)[7:],
}


@pytest.mark.parametrize("kind", TENSORS)
def test_every_kind_of_tensor_has_its_values_in_the_copy(kind: str) -> None:
    tensor = TENSORS[kind]
    (copied,) = HostCopies().copy([tensor])
    assert copied.dtype == tensor.dtype and copied.layout == tensor.layout and copied.shape == tensor.shape
    dense: Any = (lambda value: value.to_dense()) if tensor.is_sparse else (lambda value: value)
    assert torch.equal(dense(copied), dense(tensor))


def test_memory_that_was_given_back_is_used_for_the_next_copy_and_no_other_is() -> None:
    copies = HostCopies()
    states = [torch.ones(1000), torch.ones(500)]
    first = copies.copy(states)
    second = copies.copy(states)
    places = [{tensor.data_ptr() for tensor in copied} for copied in (first, second)]
    assert not places[0] & places[1]
    copies.give_back()
    third = copies.copy([torch.zeros(500), torch.zeros(1000)])
    assert {tensor.data_ptr() for tensor in third} <= places[0] | places[1]
    assert all(tensor.sum() == 0 for tensor in third)
