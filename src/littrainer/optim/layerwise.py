"""Layer-wise optimizers: each parameter has a separate optimizer, which steps as soon as its gradient is complete.

The training loop gets stand-ins for these optimizers and their schedules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

logger = logging.getLogger(__name__)

STATE_KEY = "layerwise"


class LayerwiseOptimizer(Optimizer):
    """Stands in for the optimizers of the single parameters; its own step does nothing.

    Parameters:
        optimizer_dict: parameter -> its optimizer.
        lr: the learning rate that is reported before the first step.
    """

    def __init__(self, optimizer_dict: Mapping[nn.Parameter, Optimizer], lr: float = 1e-3):
        self.optimizer_dict = dict(optimizer_dict)
        # Random, because transformers draws it: later draws (dropout, sampling) have to meet the same numbers.
        super().__init__([torch.randn(1, 1)], {"lr": lr})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, whose backward pass lets the single optimizers step."""
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: each optimizer has cleared its gradient."""

    def state_dict(self) -> dict[str, Any]:
        """Return the stand-in's state, which transformers reads too, and that of each optimizer in order."""
        return {**super().state_dict(), STATE_KEY: [own.state_dict() for own in self.optimizer_dict.values()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned; without the optimizers' states, which transformers does not save, warn."""
        super().load_state_dict(state_dict)
        _load_each(self.optimizer_dict.values(), state_dict, "optimizer")


class LayerwiseSchedule(LRScheduler):
    """Steps the schedules of all parameters with each optimizer step, and reports the learning rate they have.

    Parameters:
        optimizer: the stand-in.
        schedule_dict: parameter -> the schedule of its optimizer.
    """

    def __init__(self, optimizer: LayerwiseOptimizer, schedule_dict: Mapping[nn.Parameter, LRScheduler]):
        # torch takes a first step while it sets up; the members have taken theirs.
        self.schedule_dict: dict[nn.Parameter, LRScheduler] = {}
        super().__init__(optimizer)
        self.schedule_dict = dict(schedule_dict)
        for own in optimizer.optimizer_dict.values():
            # Schedules read it before they warn that the optimizer has not stepped; without a gradient it never does.
            own._opt_called = True  # type: ignore[attr-defined]

    def step(self, epoch: int | None = None) -> None:
        """Step all schedules."""
        for schedule in self.schedule_dict.values():
            schedule.step()
        super().step(epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of the first parameter, which stands for all."""
        own: Any = self.optimizer
        first = next(iter(own.optimizer_dict.values()))
        return [first.param_groups[0]["lr"]]

    def state_dict(self) -> dict[str, Any]:
        """Return the stand-in's state, and that of each schedule in order."""
        own = {name: value for name, value in super().state_dict().items() if name != "schedule_dict"}
        return {**own, STATE_KEY: [schedule.state_dict() for schedule in self.schedule_dict.values()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned; without the schedules' states, which transformers does not save, warn."""
        super().load_state_dict({name: value for name, value in state_dict.items() if name != STATE_KEY})
        _load_each(self.schedule_dict.values(), state_dict, "schedule")


def _load_each(members: Iterable[Any], state_dict: Mapping[str, Any], kind: str) -> None:
    states = state_dict.get(STATE_KEY)
    if states is None:
        logger.warning("This checkpoint holds no state of the layer-wise %ss: they start from the beginning.", kind)
        return
    for member, state in zip(members, states, strict=True):
        member.load_state_dict(state)


def step_in_backward(optimizers: Mapping[nn.Parameter, Optimizer]) -> None:
    """Let each parameter's optimizer step, and clear the gradient, in the backward pass that completes its gradient."""

    def step(parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

    for parameter in optimizers:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(step)
