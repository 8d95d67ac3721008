"""Keywords of `lightning.Trainer` that are derived from arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# `mixed_precision` -> `precision` of Lightning.
LIGHTNING_PRECISIONS = {"bf16": "bf16-mixed", "fp16": "16-mixed"}
FULL_PRECISION = "32-true"


def get_lightning_precision(args: Any) -> str:
    """Return Lightning's `precision`; full for fp16 on a CPU, where torch cannot scale losses."""
    if args.mixed_precision == "fp16" and args.device.type == "cpu":
        return FULL_PRECISION
    return LIGHTNING_PRECISIONS.get(args.mixed_precision, FULL_PRECISION)


# Keyword -> value, and reason for `littrainer explain`.
DERIVED_KEYWORDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "accumulate_grad_batches": (lambda args: args.gradient_accumulation_steps, "from gradient_accumulation_steps"),
    "precision": (get_lightning_precision, "from bf16 and fp16"),
    "accelerator": (lambda args: "gpu" if args.device.type == "cuda" else args.device.type, "from use_cpu"),
}
