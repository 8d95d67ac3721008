"""Stepping optimizers of other libraries: Lightning hands every `step` a closure that does forward and backward.

A Trainer calls `step()` without one, after the backward pass, and that is what libraries are tried with. Some check
their mode before they call a closure, some never call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Optimizers from here call the closure first and with gradients enabled.
CALL_THE_CLOSURE_FIRST = ("torch.optim.", "littrainer.")


def updates_during_backward(optimizer: Any) -> bool:
    """Whether the optimizer's own backward pass (`fused_backward`, as LOMO has) updates the weights."""
    return callable(getattr(optimizer, "fused_backward", None))


@contextmanager
def closure_before_step(optimizer: Any) -> Iterator[None]:
    """Within this, `optimizer.step(closure)` runs the closure and then steps without one.

    Parameters:
        optimizer: left as it is if it comes from torch or from this package; never stepped where it
            `updates_during_backward`.
    """
    if type(optimizer).__module__.startswith(CALL_THE_CLOSURE_FIRST):
        yield
        return
    own: dict[str, Any] = vars(optimizer)
    had_its_own, step = "step" in own, optimizer.step
    is_done_after_backward = updates_during_backward(optimizer)
    if is_done_after_backward:
        # torch's schedules warn when they step before the optimizer, and this is where they look.
        optimizer._opt_called = True

    def run_then_step(closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        if not is_done_after_backward:
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
