"""The accelerator of DeepSpeed: a CPU by default."""

from __future__ import annotations

DEVICE = "cpu"


class _Accelerator:
    def device_name(self) -> str:
        return DEVICE


def get_accelerator() -> _Accelerator:
    """Return the accelerator."""
    return _Accelerator()
