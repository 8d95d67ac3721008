"""Stepping after the backward pass: Lightning hands every `step` a closure that does forward and backward.

A Trainer calls `step()` without one, when the gradients are there, and that is what optimizers and their hooks are
tried with. Hooks before the step look at gradients, some optimizers check their mode before they call a closure, some
never call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def updates_during_backward(optimizer: Any) -> bool:
    """Whether the optimizer's own backward pass (`fused_backward`, as LOMO has) updates the weights."""
    return callable(getattr(optimizer, "fused_backward", None))


def step_after_backward(optimizer: Any) -> None:
    """One step, when the backward passes are done; none where the optimizer `updates_during_backward`."""
    if updates_during_backward(optimizer):
        _note_step(optimizer)
    else:
        optimizer.step()


def _note_step(optimizer: Any) -> None:
    # torch's schedules warn when they step before the optimizer, and this is where they look.
    optimizer._opt_called = True


@contextmanager
def closure_before_step(optimizer: Any, after_closure: Callable[[], Any] | None = None) -> Iterator[None]:
    """Within this, `optimizer.step(closure)` runs the closure and then steps without one.

    Parameters:
        optimizer: never stepped where it `updates_during_backward`.
        after_closure: the optimizer that steps once the closure has run, which may have put another in its place.
    """
    own: dict[str, Any] = vars(optimizer)
    had_its_own, step = "step" in own, optimizer.step
    is_done_after_backward = updates_during_backward(optimizer)
    if is_done_after_backward:
        _note_step(optimizer)

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
