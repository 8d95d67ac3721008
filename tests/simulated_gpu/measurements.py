"""Waits for the simulated device, the memory that it holds, and copies that are under way."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tests.simulated_gpu.torch_cuda import extension

LIBRARY_PATHS = ("/torch/", "tests/simulated_gpu/")
MAX_STACK_FRAMES = 12


def read_counts() -> dict[str, int]:
    """Return how often each kind of wait ("sync:...") and copy ("copy:...") has happened since `reset_counts`."""
    return dict(extension().counts())


def reset_counts() -> None:
    extension().reset_counts()


def count_waits(counts: dict[str, int] | None = None) -> int:
    """Return how often the host has waited for the device, of `read_counts()` by default."""
    counts = read_counts() if counts is None else counts
    return sum(number for kind, number in counts.items() if kind.startswith("sync:"))


def read_memory(device: int = 0) -> dict[str, int]:
    """Return "current" and "peak" bytes that are allocated, "reserved", "allocations", "frees", "ooms" and "limit"."""
    return dict(extension().memory(device))


def set_memory_limit(num_bytes: int | None, device: int = 0) -> None:
    """Let allocations beyond `num_bytes` raise torch.OutOfMemoryError; None is the whole device."""
    extension().set_limit(device, -1 if num_bytes is None else num_bytes)


@contextmanager
def record_wait_stacks() -> Iterator[Counter[tuple[str, str, str]]]:
    """Collect, for each wait and copy of the block, its kind, a description and the Python lines outside torch."""
    stacks: Counter[tuple[str, str, str]] = Counter()

    def record(kind: str, description: str, num_bytes: int) -> None:
        frames = [
            frame for frame in traceback.extract_stack() if not any(path in frame.filename for path in LIBRARY_PATHS)
        ]
        lines = [f"{frame.filename}:{frame.lineno}:{frame.name}" for frame in reversed(frames[-MAX_STACK_FRAMES:])]
        stacks[kind, description, " < ".join(lines)] += 1

    extension().set_callback(record)
    try:
        yield stacks
    finally:
        extension().set_callback(None)
