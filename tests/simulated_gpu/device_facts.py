"""Facts about the simulated device itself, gathered in a process that has two of it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch


def message_of(function: Callable[[], object]) -> str:
    """Return the message of the RuntimeError or TypeError that a function raises, or an empty text."""
    try:
        function()
    except (RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def waits_of(function: Callable[[], object]) -> int:
    from tests.simulated_gpu.measurements import count_waits, reset_counts

    reset_counts()
    function()
    return count_waits()


def gather_facts() -> dict[str, Any]:
    """Return what operations on the device raise, wait for and allocate."""
    from tests.simulated_gpu.measurements import read_memory, set_memory_limit

    cpu, first, second = torch.ones(4, 4), torch.ones(4, 4, device="cuda:0"), torch.ones(4, 4, device="cuda:1")
    pinned = torch.empty(4, 4).pin_memory()
    facts: dict[str, Any] = {
        "devices": [torch.cuda.device_count(), torch.cuda.get_device_name(0), str(first.device), str(second.device)],
        "errors": {
            "cpu and cuda": message_of(lambda: first + cpu),
            "two gpus": message_of(lambda: first @ second),
            "numpy": message_of(lambda: first.numpy()),
            "generator": message_of(lambda: torch.randn(2, device="cuda", generator=torch.Generator())),
            "no such device": message_of(lambda: torch.ones(1, device="cuda:2")),
        },
        "scalar of the cpu": (first + torch.tensor(1.0)).sum().item(),
        "waits": {
            "matmul": waits_of(lambda: first @ first),
            "item": waits_of(lambda: first.sum().item()),
            "cpu": waits_of(lambda: first.cpu()),
            "to the device": waits_of(lambda: cpu.cuda()),
            "boolean index": waits_of(lambda: first[first > 0]),
            "to pinned memory": waits_of(lambda: pinned.copy_(first, non_blocking=True)),
        },
    }
    facts["before synchronization"] = pinned.isnan().all().item()
    torch.cuda.synchronize()
    facts["after synchronization"] = pinned.sum().item()
    before = read_memory()["current"]
    block = torch.empty(1024, device="cuda")
    facts["allocated"] = read_memory()["current"] - before
    del block
    facts["freed"] = read_memory()["current"] - before
    set_memory_limit(before + 100)
    facts["errors"]["memory"] = message_of(lambda: torch.empty(1024, device="cuda"))
    set_memory_limit(None)
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    facts["draws repeat"] = torch.equal(drawn, torch.rand(3, device="cuda"))
    facts["cpu draws are separate"] = torch.equal(
        *(torch.manual_seed(1) and (torch.rand(n, device="cuda"), torch.rand(3))[1] for n in (1, 9))
    )
    if not os.fork():
        # A child that may use the device ends with another status.
        os._exit(0 if "forked" in message_of(lambda: torch.ones(1, device="cuda").item()) else 1)
    facts["forked"] = os.wait()[1]
    return facts


class SlowBackward(torch.autograd.Function):
    """The identity, whose backward pass takes a while."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        ctx.has_begun.set()
        time.sleep(0.5)
        return gradient


def leave_a_backward_pass_running() -> None:
    """Return while the device's thread still needs the GIL."""
    output = SlowBackward.apply(torch.ones(2, device="cuda", requires_grad=True))
    output.grad_fn.has_begun = has_begun = threading.Event()
    threading.Thread(target=output.sum().backward, daemon=True).start()
    has_begun.wait()
