"""What belongs to an optimizer's step: its place after the backward pass, clipping before it, and wrappers.

Lightning hands every `step` a closure that does forward and backward. A Trainer calls `step()` without one, when the
gradients are there, which is what optimizers and their hooks expect: some look at gradients before they call a closure,
some never call it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from littrainer.distributed.collectives import any_rank, get_full_tensor


def has_fused_backward(optimizer: Any) -> bool:
    """Whether the optimizer's own backward pass (`fused_backward`, as LOMO has) updates the weights."""
    return callable(getattr(optimizer, "fused_backward", None))


def mark_optimizer_stepped(optimizer: Any) -> None:
    """Count a step that is left out, or that an optimizer which `has_fused_backward` has done."""
    # torch's schedules warn when they step before the optimizer, and this is where they look.
    optimizer._opt_called = True


def step_with_closure(optimizer: Any, loss: Any, repeat: Callable[[], Any]) -> None:
    """Step an optimizer that may call its closure, as LBFGS does, after a backward pass.

    Parameters:
        loss: returned at the first call of the closure, unless weights or gradients have changed before.
        repeat: runs forward and backward again, at any other call.
    """
    if len(inspect.signature(type(optimizer).step).parameters) < 2:
        optimizer.step()
        return
    unused = [_versions(optimizer)]
    optimizer.step(lambda: loss if unused and unused.pop() == _versions(optimizer) else repeat())


def _versions(optimizer: Any) -> list[tuple[int, int]]:
    tensors = [part for group in optimizer.param_groups for weight in group["params"] for part in (weight, weight.grad)]
    return [(id(tensor), getattr(tensor, "_version", 0)) for tensor in tensors]


UNSPLIT = {nn.Parameter, torch.Tensor}


def clip_gradient_norm(parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale gradients down so that their norm, over the whole of each of them, is at most `max_norm`.

    Parameters:
        parameters: what has the gradients.
        max_norm: infinity leaves the gradients as they are.

    Returns:
        the norm before, the same in all processes that share the parameters.
    """
    given = list(parameters)
    if not _any_is_split(given):
        return nn.utils.clip_grad_norm_(given, max_norm, norm_type=norm_type)
    groups = list(_by_mesh(given).values()) or [[]]
    norms = [_norm_of(group, norm_type) for group in groups]
    total = norms[0]
    if len(norms) > 1:
        total = torch.linalg.vector_norm(torch.stack([norm.to(total.device) for norm in norms]), norm_type)
    if max_norm != float("inf"):
        for group in groups:
            nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def is_on_several_meshes(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether gradients are split between different processes, or some of them are and others are not.

    A tensor parallel model may have both kinds, and torch computes a norm over one kind only.
    """
    return _any_is_split(parameters) and len(_by_mesh(parameters)) > 1


def _any_is_split(parameters: Iterable[nn.Parameter]) -> bool:
    # Split parameters have another class; a process that trains alone has none.
    others = set(map(type, parameters)) - UNSPLIT
    return bool(others) and any(hasattr(kind, "device_mesh") for kind in others)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> dict[Any, list[nn.Parameter]]:
    groups: dict[Any, list[nn.Parameter]] = {}
    for one in parameters:
        if one.grad is not None:
            groups.setdefault(getattr(one.grad, "device_mesh", None), []).append(one)
    return groups


def _norm_of(parameters: list[nn.Parameter], norm_type: float) -> torch.Tensor:
    """The norm of the whole gradients of parameters on one mesh, or on none."""
    gradients: list[Any] = [one.grad for one in parameters]
    mesh = getattr(gradients[0], "device_mesh", None) if gradients else None
    if mesh is None or mesh.device_type == gradients[0].device.type:
        return get_full_tensor(nn.utils.get_total_norm(gradients, norm_type))
    from torch.distributed.tensor import DTensor

    # Offloaded gradients lie on the host, where the processes may not be connected.
    norms: list[Any] = [torch.linalg.vector_norm(one, norm_type) for one in gradients]
    moved: list[Any] = [
        DTensor.from_local(norm.to_local().to(mesh.device_type), mesh, norm.placements) for norm in norms
    ]
    return get_full_tensor(torch.linalg.vector_norm(torch.stack(moved), norm_type))


class GradScalerMixin:
    """Steps of which each leaves out gradients that a scaled loss has made infinite, with any optimizer."""

    # What scales the losses of fp16; None in any other precision.
    scaler: Any
    step_was_skipped = False
    # The optimizer whose gradients are unscaled for the next step.
    _unscaled_optimizer: Any = None

    def unscale(self, optimizer: Any) -> None:
        """Divide the scale out of the gradients, once for each optimizer step."""
        if self.scaler is not None and self._unscaled_optimizer is None:
            self.scaler.unscale_(optimizer)
            self._unscaled_optimizer = optimizer

    def step_unless_nonfinite(self, optimizer: Any, *args: Any) -> Any:
        """Step, unless the scaler finds gradients that are not finite; then set the scale of the next losses."""
        self.step_was_skipped = True
        handle = optimizer.register_step_pre_hook(self._note_step)
        try:
            if self._unscaled_optimizer is None or self._unscaled_optimizer is optimizer:
                result = self.scaler.step(optimizer, *args)
            else:
                # The scaler would unscale the gradients of an optimizer that has replaced another again.
                result = None if any_rank(_has_infinite_gradients(optimizer)) else optimizer.step(*args)
        finally:
            handle.remove()
        self._update_scale()
        return result

    def skip_step(self) -> None:
        """Leave a step out whose gradients are unscaled."""
        self.step_was_skipped = True
        self._update_scale()

    def _update_scale(self) -> None:
        self.scaler.update()
        self._unscaled_optimizer = None

    def _note_step(self, *_: Any) -> None:
        self.step_was_skipped = False


def _has_infinite_gradients(optimizer: Any) -> bool:
    weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]
    return not all(bool(torch.isfinite(weight.grad).all()) for weight in weights)


class OptimizerWrapper(torch.optim.Optimizer):
    """Wraps an optimizer, which has every attribute that this class does not define.

    Parameters:
        optimizer: the optimizer inside, which does the work.
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
        """Defaults of groups; not every optimizer of a library has them."""
        return getattr(self.optimizer, "defaults", {})

    def state_dict(self) -> dict[str, Any]:
        """Return states and groups of the optimizer inside."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Put an optimizer with modes, such as a schedule-free one, into training mode."""
        self._set_mode("train")

    def eval(self) -> None:
        """Put an optimizer with modes into evaluation mode."""
        self._set_mode("eval")

    def _set_mode(self, mode: str) -> None:
        switch = getattr(self.optimizer, mode, None)
        if callable(switch):
            switch()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


class ClosureFirstOptimizer(OptimizerWrapper):
    """An optimizer as Lightning steps it: its `step` runs the closure first, and then steps without one.

    Parameters:
        optimizer: the optimizer inside, which has the attributes that are set on this one, as a GradScaler does.
        take_step: takes the optimizer inside, the closure and the loss that the closure has returned.
    """

    def __init__(self, optimizer: Any, take_step: Callable[[Any, Callable[[], Any] | None, Any], None]):
        vars(self).update(optimizer=optimizer, take_step=take_step)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.optimizer, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.optimizer, name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, then step."""
        loss = None if closure is None else closure()
        self.take_step(self.optimizer, closure, loss)
        return loss
