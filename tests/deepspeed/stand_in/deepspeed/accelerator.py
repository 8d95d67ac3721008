"""What DeepSpeed works on: a CPU, unless a test says otherwise."""

from __future__ import annotations

DEVICE = "cpu"


class _Accelerator:
    def device_name(self) -> str:
        return DEVICE


def get_accelerator() -> _Accelerator:
    """The accelerator."""
    return _Accelerator()
