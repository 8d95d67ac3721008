"""What belongs to an optimizer's step: its place after the backward pass, clipping before it, and wrappers.

Lightning hands every `step` a closure that does forward and backward. A Trainer calls `step()` without one, when the
gradients are there, which is what optimizers and their hooks expect: some look at gradients before they call a closure,
some never call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from littrainer.distributed.collectives import whole_tensor


class _NoOptimizer:
    def step(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


# Steps in the place of an optimizer whose step is left out.
LEAVES_WEIGHTS = _NoOptimizer()


def updates_during_backward(optimizer: Any) -> bool:
    """Whether the optimizer's own backward pass (`fused_backward`, as LOMO has) updates the weights."""
    return callable(getattr(optimizer, "fused_backward", None))


def note_step(optimizer: Any) -> None:
    """Count as a step what an optimizer that `updates_during_backward` has done."""
    # torch's schedules warn when they step before the optimizer, and this is where they look.
    optimizer._opt_called = True


@contextmanager
def closure_before_step(optimizer: Any, after_closure: Callable[[], Any] | None = None) -> Iterator[None]:
    """Within this, `optimizer.step(closure)` runs the closure and then steps without one.

    Parameters:
        optimizer: never stepped if it `updates_during_backward`.
        after_closure: returns the optimizer to step when the closure has run, which may have replaced it.
    """
    own: dict[str, Any] = vars(optimizer)
    had_its_own, step = "step" in own, optimizer.step
    is_done_after_backward = updates_during_backward(optimizer)
    if is_done_after_backward:
        note_step(optimizer)

    def run_then_step(closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        now = optimizer if after_closure is None else after_closure()
        if now is not optimizer:
            now.step()
        elif not is_done_after_backward:
            step()
        return loss

    own["step"] = run_then_step
    try:
        yield
    finally:
        if had_its_own:
            own["step"] = step
        else:
            del own["step"]


UNSPLIT = {nn.Parameter, torch.Tensor}


def clip_by_norm(parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
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


def lie_on_several_meshes(parameters: Iterable[nn.Parameter]) -> bool:
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
        return whole_tensor(nn.utils.get_total_norm(gradients, norm_type))
    from torch.distributed.tensor import DTensor

    # Offloaded gradients lie on the host, where the processes may not be connected.
    norms: list[Any] = [torch.linalg.vector_norm(one, norm_type) for one in gradients]
    moved: list[Any] = [
        DTensor.from_local(norm.to_local().to(mesh.device_type), mesh, norm.placements) for norm in norms
    ]
    return whole_tensor(torch.linalg.vector_norm(torch.stack(moved), norm_type))


class ScaledSteps:
    """Steps of which each leaves out gradients that a scaled loss has made infinite, with any optimizer."""

    # What scales the losses of fp16; None in any other precision.
    scaler: Any
    step_was_skipped = False
    _is_unscaled = False

    def unscale(self, optimizer: Any) -> None:
        """Divide the scale out of the gradients, once for each optimizer step."""
        if self.scaler is not None and not self._is_unscaled:
            self.scaler.unscale_(optimizer)
            self._is_unscaled = True

    def step_unless_infinite(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step, unless the scaler finds gradients that are not finite; then set the scale of the next losses."""
        self.step_was_skipped = True
        handle = optimizer.register_step_pre_hook(self._note_step)
        try:
            result = self.scaler.step(optimizer, *args, **kwargs)
        finally:
            handle.remove()
        self.scaler.update()
        self._is_unscaled = False
        return result

    def _note_step(self, *_: Any) -> None:
        self.step_was_skipped = False


class OptimizerAround(torch.optim.Optimizer):
    """Wraps an optimizer, which answers everything that this class does not define.

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
