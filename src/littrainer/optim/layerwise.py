"""Layer-wise optimizers, which step each parameter as soon as its gradient is complete."""

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
    """Placeholder for the per-parameter optimizers; its own step does nothing.

    Parameters:
        lr: the learning rate before the first step.
    """

    def __init__(self, optimizer_dict: Mapping[nn.Parameter, Optimizer], lr: float = 1e-3):
        self.optimizer_dict = dict(optimizer_dict)
        # Draw a random number, as transformers does here.
        super().__init__([torch.randn(1, 1)], {"lr": lr})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: each per-parameter optimizer clears its gradient."""

    def state_dict(self) -> dict[str, Any]:
        """Return the placeholder's state, which transformers reads too, and the state of each optimizer."""
        states = [optimizer.state_dict() for optimizer in self.optimizer_dict.values()]
        return {**super().state_dict(), STATE_KEY: states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; warn if it lacks the per-parameter states, which transformers does not save."""
        super().load_state_dict(state_dict)
        _load_each(self.optimizer_dict.values(), state_dict, "optimizer")


class LayerwiseSchedule(LRScheduler):
    """Schedule that steps the schedules of all parameters."""

    def __init__(self, optimizer: LayerwiseOptimizer, schedule_dict: Mapping[nn.Parameter, LRScheduler]):
        # torch's constructor steps once; the per-parameter schedules have done so already.
        self.schedule_dict: dict[nn.Parameter, LRScheduler] = {}
        super().__init__(optimizer)
        self.schedule_dict = dict(schedule_dict)
        for member in optimizer.optimizer_dict.values():
            # Prevents a warning: an optimizer without a gradient never steps.
            member._opt_called = True  # type: ignore[attr-defined]

    def step(self, epoch: int | None = None) -> None:
        for schedule in self.schedule_dict.values():
            schedule.step()
        super().step(epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the first parameter's learning rate, as a representative."""
        placeholder: Any = self.optimizer
        first = next(iter(placeholder.optimizer_dict.values()))
        return [first.param_groups[0]["lr"]]

    def state_dict(self) -> dict[str, Any]:
        state = {name: value for name, value in super().state_dict().items() if name != "schedule_dict"}
        return {**state, STATE_KEY: [schedule.state_dict() for schedule in self.schedule_dict.values()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; warn if it lacks the per-parameter states, which transformers does not save."""
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
    """Step each parameter's optimizer in backward, once its gradient is complete."""

    def step(parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

    for parameter in optimizers:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(step)
