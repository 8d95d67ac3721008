"""The keywords of `lightning.Trainer` that follow from arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Value of `mixed_precision` -> Lightning's name for it.
LIGHTNING_PRECISIONS = {"bf16": "bf16-mixed", "fp16": "16-mixed"}
FULL_PRECISION = "32-true"


def get_lightning_precision(args: Any) -> str:
    """Return the `precision` of `lightning.Trainer` for bf16 and fp16.

    float16 needs its losses scaled, for which torch has nothing on a CPU, so there fp16 trains in full precision.
    """
    if args.mixed_precision == "fp16" and args.device.type == "cpu":
        return FULL_PRECISION
    return LIGHTNING_PRECISIONS.get(args.mixed_precision, FULL_PRECISION)


# Keyword -> its value, and the reason for `littrainer explain`.
DERIVED_KEYWORDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "accumulate_grad_batches": (lambda args: args.gradient_accumulation_steps, "from gradient_accumulation_steps"),
    "precision": (get_lightning_precision, "from bf16 and fp16"),
    "accelerator": (lambda args: "gpu" if args.device.type == "cuda" else args.device.type, "from use_cpu"),
}
