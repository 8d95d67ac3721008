"""An optimizer that stands around another one."""

from __future__ import annotations

from typing import Any

import torch


class OptimizerAround(torch.optim.Optimizer):
    """Shows the groups and states of the optimizer inside, and asks it for everything that is not its own.

    Parameters:
        optimizer: the one that does the work.
    """

    def __init__(self, optimizer: Any):
        # Not torch's constructor: parameters, states and hooks are those of the optimizer inside.
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def state(self) -> Any:  # type: ignore[override]
        """States by parameter."""
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups with their learning rates."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Settings of groups that say nothing else; not every optimizer of a library has them."""
        return getattr(self.optimizer, "defaults", {})

    def state_dict(self) -> dict[str, Any]:
        """States and groups of the optimizer inside."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Tell an optimizer with modes, such as a schedule-free one, that training goes on."""
        self._set_mode("train")

    def eval(self) -> None:
        """Tell an optimizer with modes that an evaluation comes."""
        self._set_mode("eval")

    def _set_mode(self, mode: str) -> None:
        switch = getattr(self.optimizer, mode, None)
        if callable(switch):
            switch()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"
