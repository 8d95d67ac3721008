"""Which part of a loss is divided by the number that it is given, found out by trying."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

import torch
from torch import nn

from littrainer.checkpoint.random_state import capture_random_states, set_random_states
from littrainer.distributed.agreement import largest

# A power of two, so that what is divided by it is exact; what remains is the part that is not divided.
LARGE = 2.0**20
# Shares of the whole loss: the least part that is told from none, and what kernels that add in any order may differ by.
NO_PART = 1e-5
NO_DIFFERENCE = 1e-3


class Divided(IntEnum):
    """How much of a loss is divided by a number; of what processes find, the largest counts."""

    # The loss was 0 or no number.
    UNKNOWN = 0
    NOT_AT_ALL = 1
    WHOLLY = 2
    PARTLY = 3


def part_divided(
    loss_for: Callable[[torch.Tensor], torch.Tensor], module: nn.Module, number: torch.Tensor, has_labels: bool = True
) -> Divided:
    """How much of a loss is divided by the number that it is given; all processes ask.

    Many models take any keyword and return the mean whatever it says. Two forward passes tell, in the mode that the
    module is in, since a part of the loss may be there in training only. They log nothing through the module, and leave
    its buffers and the random generators as they are.

    Parameters:
        loss_for: the loss for a number.
        module: the LightningModule, or a model.
        number: one to try.
        has_labels: whether this process's batch has labels that count; where it has not, its loss tells nothing.
    """
    with torch.no_grad(), _as_it_was(module), _without_logging(module), warnings.catch_warnings():
        # Those of the forward pass are shown when it is made in earnest.
        warnings.simplefilter("ignore")
        states = capture_random_states()
        losses = []
        for factor in (1.0, LARGE):
            set_random_states(states)
            losses.append(loss_for(number * factor).detach().float().sum())
        set_random_states(states)
    return Divided(largest(_judged(losses[0].item(), losses[1].item()) if has_labels else Divided.UNKNOWN))


def _judged(loss: float, remainder: float) -> Divided:
    # Also for what is no number every comparison is false.
    if not 0 < abs(loss) < float("inf"):
        return Divided.UNKNOWN
    share = remainder / loss
    if abs(share) < NO_PART:
        return Divided.WHOLLY
    return Divided.NOT_AT_ALL if abs(share - 1) < NO_DIFFERENCE else Divided.PARTLY


@contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """Undo what is written into buffers; one that is put in the place of another goes with other attributes."""
    saved = [
        (part, name, buffer, buffer.clone())
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, buffer, value in saved:
                if getattr(part, name, None) is buffer and buffer.shape == value.shape:
                    buffer.copy_(value)


@contextmanager
def _without_logging(module: nn.Module) -> Iterator[None]:
    if not hasattr(module, "log"):
        yield
        return
    # On the object it comes before the class's method, which `log_dict` calls too.
    own = module.__dict__.get("log")
    module.__dict__["log"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del module.__dict__["log"]
        if own is not None:
            module.__dict__["log"] = own
