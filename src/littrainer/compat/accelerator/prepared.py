"""A second optimizer and its schedule, prepared: they step with the windows of the training that calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from littrainer.optim.stepping import OptimizerAround

if TYPE_CHECKING:
    from littrainer.compat.accelerator.facade import AcceleratorFacade


class PreparedOptimizer(OptimizerAround):
    """An optimizer that steps, and clears its gradients, only at the last micro-batch of an optimizer step.

    Parameters:
        optimizer: the one that does the work; everything else is asked of it.
        accelerator: knows whether the window closes, and scales the losses of fp16.
    """

    _is_accelerate_prepared = True

    def __init__(self, optimizer: torch.optim.Optimizer, accelerator: AcceleratorFacade):
        super().__init__(optimizer)
        self.accelerator = accelerator
        self.step_was_skipped = False
        self._is_unscaled = False

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """What scales the losses of fp16; None in any other precision."""
        return self.accelerator.scaler

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        self.optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, at the last micro-batch of an optimizer step."""
        if self.accelerator.sync_gradients:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> Any:
        """Step at the last micro-batch of an optimizer step; with fp16 not where gradients are not finite."""
        if not self.accelerator.sync_gradients:
            return None
        scaler = self.scaler
        if scaler is None:
            return self.optimizer.step(closure)
        self.step_was_skipped = True
        handle = self.optimizer.register_step_pre_hook(self._note_step)
        try:
            result = scaler.step(self.optimizer) if closure is None else scaler.step(self.optimizer, closure)
        finally:
            handle.remove()
        scaler.update()
        self._is_unscaled = False
        return result

    def unscale(self) -> None:
        """Divide the scale of fp16 out of the gradients, once for each step."""
        scaler = self.scaler
        if scaler is not None and not self._is_unscaled:
            scaler.unscale_(self.optimizer)
            self._is_unscaled = True

    def _note_step(self, *_: Any) -> None:
        self.step_was_skipped = False

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class PreparedScheduler:
    """A schedule that steps with the optimizer steps that were taken.

    Parameters:
        scheduler: the one that does the work; everything else is asked of it.
        optimizers: the prepared optimizers it belongs to; with fp16 any of them may skip a step.
        accelerator: knows whether the window closes.
    """

    _is_accelerate_prepared = True

    def __init__(self, scheduler: Any, optimizers: list[PreparedOptimizer], accelerator: AcceleratorFacade):
        self.scheduler = scheduler
        self.optimizers = optimizers
        self.accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        if name in ("scheduler", "optimizers", "accelerator"):
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step where the optimizers have; once for each process, unless batches are split between them."""
        if not self.accelerator.sync_gradients:
            if self.accelerator.gradient_state.adjust_scheduler:
                self.scheduler._step_count += 1
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        for _ in range(1 if self.accelerator.split_batches else self.accelerator.num_processes):
            # A schedule of fixed length refuses to step beyond it.
            if getattr(self.scheduler, "_step_count", 0) <= getattr(self.scheduler, "total_steps", float("inf")):
                self.scheduler.step(*args, **kwargs)
