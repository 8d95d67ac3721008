"""Arguments that the newest transformers release does not have: two of earlier 5.x releases, and littrainer's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from littrainer.arguments.about import about


@dataclass
class AdditionalFields:
    """Warmup as a ratio, the TensorBoard folder, and keywords handed on to Lightning."""

    warmup_ratio: float | None = field(
        default=None,
        metadata=about(
            "Share of all steps to warm up for; above 0 it replaces `warmup_steps`, which takes a share as well."
        ),
    )
    logging_dir: str | None = field(default=None, metadata=about("Folder for TensorBoard files."))
    lightning: dict[str, Any] | str | None = field(
        default=None, metadata=about("Further keywords for `lightning.Trainer`, such as `profiler` or `plugins`.")
    )
