"""Optimizers and schedules that `accelerator.prepare` returns."""

from __future__ import annotations

from typing import Any

import torch

from littrainer.optim.stepping import GradScalerMixin, OptimizerWrapper


class PreparedOptimizer(GradScalerMixin, OptimizerWrapper):
    """Optimizer that steps and clears gradients only at the last micro-batch of an optimizer step."""

    _is_accelerate_prepared = True

    def __init__(self, optimizer: torch.optim.Optimizer, accelerator: Any):
        super().__init__(optimizer)
        self.accelerator = accelerator

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        return self.accelerator.scaler

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.accelerator.sync_gradients:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> Any:
        """Step at the last micro-batch; with fp16, only if gradients are finite."""
        if not self.accelerator.sync_gradients:
            return None
        if self.scaler is None:
            return self.optimizer.step(closure)
        return self.step_unless_nonfinite(self.optimizer, *(() if closure is None else (closure,)))

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class PreparedScheduler:
    """Schedule that steps when its prepared optimizers have stepped."""

    _is_accelerate_prepared = True

    def __init__(self, scheduler: Any, optimizers: list[PreparedOptimizer], accelerator: Any):
        self.scheduler = scheduler
        self.optimizers = optimizers
        self.accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        if name in ("scheduler", "optimizers", "accelerator"):
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step once per process, unless batches are split over the processes."""
        if not self.accelerator.sync_gradients:
            if self.accelerator.gradient_state.adjust_scheduler:
                self.scheduler._step_count += 1
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        for _ in range(1 if self.accelerator.split_batches else self.accelerator.num_processes):
            # A schedule of fixed length raises beyond it.
            if getattr(self.scheduler, "_step_count", 0) <= getattr(self.scheduler, "total_steps", float("inf")):
                self.scheduler.step(*args, **kwargs)
