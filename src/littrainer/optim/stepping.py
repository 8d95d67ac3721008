"""Optimizer steps: clipping, loss scaling and wrappers.

A Trainer calls `step()` after backward and without Lightning's closure, because some optimizers and hooks read
gradients before they call the closure, and some never call it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from littrainer.distributed.collectives import any_rank, get_full_tensor


def has_fused_backward(optimizer: Any) -> bool:
    """Return whether the optimizer updates weights in its own backward pass, as in LOMO."""
    return callable(getattr(optimizer, "fused_backward", None))


def mark_optimizer_stepped(optimizer: Any) -> None:
    """Mark a skipped or fused step, so that torch's schedules do not warn."""
    optimizer._opt_called = True


def step_with_closure(optimizer: Any, loss: Any, repeat: Callable[[], Any]) -> None:
    """Step an optimizer after backward; it may call its closure, as LBFGS does.

    Parameters:
        loss: result of the first closure call, unless weights or gradients have changed.
        repeat: runs forward and backward again for later calls.
    """
    if len(inspect.signature(type(optimizer).step).parameters) < 2:
        optimizer.step()
        return
    unused = [_get_versions(optimizer)]
    optimizer.step(lambda: loss if unused and unused.pop() == _get_versions(optimizer) else repeat())


def _get_versions(optimizer: Any) -> list[tuple[int, int]]:
    tensors = [
        tensor for group in optimizer.param_groups for param in group["params"] for tensor in (param, param.grad)
    ]
    return [(id(tensor), getattr(tensor, "_version", 0)) for tensor in tensors]


UNSHARDED_CLASSES = {nn.Parameter, torch.Tensor}


def clip_gradient_norm(parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Clip gradients, sharded or not, to a total norm of `max_norm`, possibly infinite.

    Returns:
        the norm before clipping, equal in all processes that share the parameters.
    """
    params = list(parameters)
    if not _has_sharded(params):
        return nn.utils.clip_grad_norm_(params, max_norm, norm_type=norm_type)
    groups = list(_group_by_mesh(params).values()) or [[]]
    norms = [_compute_gradient_norm(group, norm_type) for group in groups]
    total = norms[0]
    if len(norms) > 1:
        total = torch.linalg.vector_norm(torch.stack([norm.to(total.device) for norm in norms]), norm_type)
    if max_norm != float("inf"):
        for group in groups:
            nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def is_on_several_meshes(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether gradients are on several meshes, or on a mesh and none: torch computes no norm of both."""
    return _has_sharded(parameters) and len(_group_by_mesh(parameters)) > 1


def _has_sharded(parameters: Iterable[nn.Parameter]) -> bool:
    # Fast path: no sharded parameters.
    classes = set(map(type, parameters)) - UNSHARDED_CLASSES
    return bool(classes) and any(hasattr(cls, "device_mesh") for cls in classes)


def _group_by_mesh(parameters: Iterable[nn.Parameter]) -> dict[Any, list[nn.Parameter]]:
    groups: dict[Any, list[nn.Parameter]] = {}
    for param in parameters:
        if param.grad is not None:
            groups.setdefault(getattr(param.grad, "device_mesh", None), []).append(param)
    return groups


def _compute_gradient_norm(parameters: list[nn.Parameter], norm_type: float) -> torch.Tensor:
    """Return the norm of the full gradients of parameters on the same mesh, or none."""
    gradients: list[Any] = [param.grad for param in parameters]
    mesh = getattr(gradients[0], "device_mesh", None) if gradients else None
    if mesh is None or mesh.device_type == gradients[0].device.type:
        return get_full_tensor(nn.utils.get_total_norm(gradients, norm_type))
    from torch.distributed.tensor import DTensor

    # Reduce on the device: offloaded gradients' host may have no process group.
    norms: list[Any] = [torch.linalg.vector_norm(gradient, norm_type) for gradient in gradients]
    device_norms: list[Any] = [
        DTensor.from_local(norm.to_local().to(mesh.device_type), mesh, norm.placements) for norm in norms
    ]
    return get_full_tensor(torch.linalg.vector_norm(torch.stack(device_norms), norm_type))


class GradScalerMixin:
    """Optimizer steps that are skipped if loss scaling made gradients non-finite."""

    # GradScaler of fp16, or None.
    scaler: Any
    step_was_skipped = False
    _unscaled_optimizer: Any = None

    def unscale(self, optimizer: Any) -> None:
        """Unscale the gradients, once per optimizer step."""
        if self.scaler is not None and self._unscaled_optimizer is None:
            self.scaler.unscale_(optimizer)
            self._unscaled_optimizer = optimizer

    def step_unless_nonfinite(self, optimizer: Any, *args: Any) -> Any:
        """Step, unless the scaler finds non-finite gradients; then update the scale."""
        self.step_was_skipped = True
        handle = optimizer.register_step_pre_hook(self._clear_skipped)
        try:
            if self._unscaled_optimizer is None or self._unscaled_optimizer is optimizer:
                result = self.scaler.step(optimizer, *args)
            else:
                # The scaler has unscaled the optimizer that this optimizer replaced.
                result = None if any_rank(_has_nonfinite_gradients(optimizer)) else optimizer.step(*args)
        finally:
            handle.remove()
        self._update_scale()
        return result

    def skip_step(self) -> None:
        """Skip a step after its gradients were unscaled."""
        self.step_was_skipped = True
        self._update_scale()

    def _update_scale(self) -> None:
        self.scaler.update()
        self._unscaled_optimizer = None

    def _clear_skipped(self, *_: Any) -> None:
        self.step_was_skipped = False


def _has_nonfinite_gradients(optimizer: Any) -> bool:
    params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    return not all(bool(torch.isfinite(param.grad).all()) for param in params)


class OptimizerWrapper(torch.optim.Optimizer):
    """Wrapper that delegates undefined attributes to the wrapped optimizer."""

    def __init__(self, optimizer: Any):
        # Without torch's constructor: parameters, states and hooks belong to the wrapped optimizer.
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return getattr(self.optimizer, "defaults", {})

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Set the training mode of an optimizer that has modes, such as a schedule-free optimizer."""
        self._set_mode("train")

    def eval(self) -> None:
        self._set_mode("eval")

    def _set_mode(self, mode: str) -> None:
        switch = getattr(self.optimizer, mode, None)
        if callable(switch):
            switch()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


class ClosureFirstOptimizer(OptimizerWrapper):
    """Wrapper for Lightning whose `step` runs the closure first and then steps without it.

    Parameters:
        optimizer: the wrapped optimizer, which also gets attributes set on the wrapper (by a GradScaler).
        take_step: called with the wrapped optimizer, the closure and its loss.
    """

    def __init__(self, optimizer: Any, take_step: Callable[[Any, Callable[[], Any] | None, Any], None]):
        vars(self).update(optimizer=optimizer, take_step=take_step)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.optimizer, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.optimizer, name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        self.take_step(self.optimizer, closure, loss)
        return loss
