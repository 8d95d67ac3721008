"""Adafactor (Shazeer and Stern 2018, "Adafactor: adaptive learning rates with sublinear memory cost").

For a matrix of gradients it keeps the mean squares of rows and of columns instead of one for each entry; their product
approximates the second moment. Interface, state and arithmetic are those of transformers' class of this name, so that
an optimizer.pt written by one is read by the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

LOW_PRECISION = (torch.float16, torch.bfloat16)


class Adafactor(Optimizer):
    """Adafactor, with a learning rate of its own (`relative_step`) or a given one.

    Parameters:
        params: parameters or parameter groups.
        lr: learning rate; None with `relative_step`.
        eps: added to squared gradients, and the least scale of a parameter.
        clip_threshold: root mean square above which an update is scaled down.
        decay_rate: exponent of the step in the decay of the second moment.
        beta1: decay of a running mean of updates; None keeps none.
        weight_decay: decay of weights, in units of the learning rate.
        scale_parameter: scale the learning rate with the parameter's root mean square.
        relative_step: derive the learning rate from the step.
        warmup_init: let the derived learning rate rise from 1e-6.

    Raises:
        ValueError: a given `lr` together with `relative_step`, or `warmup_init` without it.
    """

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ):
        if relative_step and lr is not None:
            raise ValueError(f"Adafactor derives its learning rate; lr={lr} needs relative_step=False.")
        if warmup_init and not relative_step:
            raise ValueError("Adafactor's warmup_init needs relative_step=True.")
        settings = {
            "relative_step": relative_step,
            "scale_parameter": scale_parameter,
            "warmup_init": warmup_init,
            "weight_decay": weight_decay,
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
            "beta1": beta1,
            "eps": eps,
            "lr": lr,
        }
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one optimizer step.

        Parameters:
            closure: computes the loss and its gradients anew; by default the gradients are there.

        Returns:
            what the closure returned.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient: Any = parameter.grad
        if gradient.is_sparse:
            raise RuntimeError("Adafactor takes dense gradients only; make the embedding with sparse=False.")
        if gradient.dtype in LOW_PRECISION:
            gradient = gradient.float()
        state = self._state_of(parameter, gradient, keeps_mean=group["beta1"] is not None)
        weights = parameter.float() if parameter.dtype in LOW_PRECISION else parameter
        state["step"] += 1
        state["RMS"] = _root_mean_square(weights)
        rate = _learning_rate(group, state)

        update = _scaled_by_second_moment(gradient, state, group)
        update.div_((_root_mean_square(update) / group["clip_threshold"]).clamp_(min=1.0))
        update.mul_(rate)
        if group["beta1"] is not None:
            mean = state["exp_avg"]
            mean.mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
            update = mean
        if group["weight_decay"] != 0:
            weights.add_(weights, alpha=-group["weight_decay"] * rate)
        weights.add_(-update)
        if weights is not parameter:
            parameter.copy_(weights)

    def _state_of(self, parameter: torch.Tensor, gradient: torch.Tensor, keeps_mean: bool) -> dict[str, Any]:
        state = self.state[parameter]
        if state:
            # A loaded state has the parameter's dtype, the arithmetic is the gradient's.
            state.update({name: value.to(gradient) for name, value in state.items() if name.startswith("exp_avg")})
            return state
        state.update(step=0, RMS=0)
        if keeps_mean:
            state["exp_avg"] = torch.zeros_like(gradient)
        if gradient.dim() >= 2:
            state["exp_avg_sq_row"] = gradient.new_zeros(gradient.shape[:-1])
            state["exp_avg_sq_col"] = gradient.new_zeros(gradient.shape[:-2] + gradient.shape[-1:])
        else:
            state["exp_avg_sq"] = torch.zeros_like(gradient)
        return state

    # AdafactorSchedule of transformers, which reports the derived learning rate, calls this.
    @staticmethod
    def _get_lr(param_group: dict[str, Any], param_state: dict[str, Any]) -> Any:
        return _learning_rate(param_group, param_state)


def _learning_rate(group: dict[str, Any], state: dict[str, Any]) -> Any:
    rate = group["lr"]
    if group["relative_step"]:
        at_most = 1e-6 * state["step"] if group["warmup_init"] else 1e-2
        rate = min(at_most, 1.0 / math.sqrt(state["step"]))
    scale = max(group["eps"][1], state["RMS"]) if group["scale_parameter"] else 1.0
    return scale * rate


def _scaled_by_second_moment(gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
    decay = 1.0 - math.pow(state["step"], group["decay_rate"])
    squares = gradient**2 + group["eps"][0]
    if "exp_avg_sq" in state:
        return state["exp_avg_sq"].mul_(decay).add_(squares, alpha=1.0 - decay).rsqrt().mul_(gradient)
    rows = state["exp_avg_sq_row"].mul_(decay).add_(squares.mean(dim=-1), alpha=1.0 - decay)
    columns = state["exp_avg_sq_col"].mul_(decay).add_(squares.mean(dim=-2), alpha=1.0 - decay)
    row_factor = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
    return torch.mul(row_factor, columns.unsqueeze(-2).rsqrt()).mul_(gradient)


def _root_mean_square(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.norm(2) / tensor.numel() ** 0.5
