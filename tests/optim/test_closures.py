from __future__ import annotations

from typing import Any

import pytest
import torch

from littrainer.optim.adafactor import Adafactor
from littrainer.optim.stepping import closure_before_step, updates_during_backward
from tests.optim.libraries import Recording

PARAMETERS = [torch.nn.Parameter(torch.zeros(1))]


class Ordered(Recording):
    """Notes when it steps, and with what."""

    def __init__(self) -> None:
        super().__init__(PARAMETERS)
        self.order: list[Any] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.order.append(("step", closure))


class Fused(Ordered):
    def fused_backward(self, loss: torch.Tensor, rate: float) -> None: ...


def test_an_optimizer_of_another_library_steps_after_the_closure_and_without_it() -> None:
    optimizer = Ordered()
    step: Any = optimizer.step

    def closure() -> float:
        optimizer.order.append("closure")
        return 3.0

    with closure_before_step(optimizer):
        run: Any = optimizer.step
        assert run(closure=closure) == 3.0
        assert run() is None
    assert optimizer.order == ["closure", ("step", None), ("step", None)]
    assert optimizer.step == step
    assert "step" not in vars(optimizer)


def test_a_step_that_a_schedule_has_replaced_is_put_back() -> None:
    optimizer = Ordered()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    replaced = vars(optimizer)["step"]
    with pytest.raises(KeyError), closure_before_step(optimizer):
        raise KeyError
    assert vars(optimizer)["step"] is replaced


@pytest.mark.parametrize("kind", [torch.optim.SGD, Adafactor])
def test_a_hook_before_the_step_sees_the_gradients_of_the_closure(kind: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = kind([parameter])
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(parameter.grad))
    with closure_before_step(optimizer):
        run: Any = optimizer.step
        run(lambda: (parameter * 3).sum().backward())
    assert torch.equal(seen[0], torch.full((2,), 3.0))


def test_an_optimizer_whose_step_takes_no_closure_is_stepped() -> None:
    class WithoutClosure(torch.optim.SGD):
        def step(self) -> None:  # type: ignore[override]
            super().step()

    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = WithoutClosure([parameter], lr=1.0)
    with closure_before_step(optimizer):
        run: Any = optimizer.step
        run(lambda: parameter.sum().backward())
    assert torch.equal(parameter.data, torch.zeros(2))


def test_an_optimizer_that_updates_during_backward_runs_the_closure_and_does_not_step() -> None:
    optimizer = Fused()
    with closure_before_step(optimizer):
        run: Any = optimizer.step
        assert run(lambda: 2.0) == 2.0
    assert optimizer.order == []
    assert [updates_during_backward(one) for one in (optimizer, Ordered())] == [True, False]
