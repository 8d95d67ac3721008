from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor as TheirAdafactor
from transformers.optimization import AdafactorSchedule

from littrainer.optim.adafactor import Adafactor

SETTINGS: dict[str, dict[str, Any]] = {
    "as the Trainer sets it": {"lr": 0.01, "scale_parameter": False, "relative_step": False},
    "derived rate": {},
    "warm-up": {"warmup_init": True},
    "scaled": {"lr": 0.01, "relative_step": False},
    "running mean": {"lr": 0.01, "relative_step": False, "scale_parameter": False, "beta1": 0.9},
    "weight decay": {"lr": 0.01, "relative_step": False, "scale_parameter": False, "weight_decay": 0.1},
    "weight decay, scaled": {"weight_decay": 0.1},
    "other constants": {"eps": (1e-20, 0.1), "clip_threshold": 0.3, "decay_rate": -0.5},
}
SHAPES = ((), (5,), (4, 3), (2, 3, 4))


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def take_steps(optimizer: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 10
        optimizer.step()


def plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, list):
        return [plain(value) for value in state]
    return (state.dtype, state.tolist()) if isinstance(state, torch.Tensor) else state


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_and_state_are_exactly_those_of_transformers_class(
    settings: dict[str, Any], dtype: torch.dtype
) -> None:
    ours, theirs = Adafactor(parameters(dtype), **settings), TheirAdafactor(parameters(dtype), **settings)
    for optimizer in (ours, theirs):
        take_steps(optimizer, range(6))
    found, expected = (optimizer.param_groups[0]["params"] for optimizer in (ours, theirs))
    assert [plain(weights) for weights in found] == [plain(weights) for weights in expected]
    # The first steps of the warm-up are smaller than what bfloat16 resolves.
    start = [plain(weights) for weights in parameters(dtype)]
    assert dtype == torch.bfloat16 or [plain(weights) for weights in found] != start
    assert plain(ours.state_dict()) == plain(theirs.state_dict())


@pytest.mark.parametrize("kinds", [(Adafactor, TheirAdafactor), (TheirAdafactor, Adafactor)], ids=["ours", "theirs"])
def test_a_saved_state_goes_on_in_the_other_library(tmp_path: Path, kinds: Any) -> None:
    settings = SETTINGS["running mean"]
    whole = kinds[0](parameters(torch.float32), **settings)
    take_steps(whole, range(6))
    first = kinds[0](parameters(torch.float32), **settings)
    take_steps(first, range(3))
    torch.save(first.state_dict(), tmp_path / "optimizer.pt")
    second = kinds[1](first.param_groups[0]["params"], **settings)
    second.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    take_steps(second, range(3, 6))
    pairs = zip(whole.param_groups[0]["params"], second.param_groups[0]["params"], strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_parameter_without_a_gradient_stays_and_has_no_state() -> None:
    optimizer = Adafactor(parameters(torch.float32))
    before = [parameter.clone() for parameter in optimizer.param_groups[0]["params"]]
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, optimizer.param_groups[0]["params"], strict=True))
    assert not optimizer.state


def test_the_closure_computes_gradients_and_its_loss_is_returned() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = Adafactor([weight], lr=0.1, relative_step=False, scale_parameter=False)

    def closure() -> torch.Tensor:
        loss = (weight**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert weight.max() < 1


def test_the_schedule_of_transformers_reads_the_derived_rate() -> None:
    optimizer = Adafactor([nn.Parameter(torch.ones(2, 2))], scale_parameter=False)
    schedule = AdafactorSchedule(optimizer)
    take_steps(optimizer, range(2))
    assert schedule.get_lr() == [1e-2]


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lr=0\.1 needs relative_step=False"):
        Adafactor(parameters(torch.float32), lr=0.1)
    with pytest.raises(ValueError, match="warmup_init needs relative_step=True"):
        Adafactor(parameters(torch.float32), lr=0.1, relative_step=False, warmup_init=True)


def test_a_sparse_gradient_is_refused_with_what_to_do() -> None:
    table = nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        Adafactor(table.parameters()).step()
