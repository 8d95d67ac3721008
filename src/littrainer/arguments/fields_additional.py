"""Arguments that the newest transformers release does not have: two of earlier 5.x releases, and littrainer's own."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any

from littrainer.arguments.about import about

# Signals with which schedulers and users announce the end of a process, as far as this platform has them.
ANNOUNCING_SIGNALS = tuple(
    name
    for name in ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU", "SIGINT")
    if name in signal.Signals.__members__
)
DEFAULT_ANNOUNCING_SIGNAL = "SIGTERM"

EVAL_LOSS_WEIGHTINGS = ("batches", "samples", "labels")


# By keyword only, so that they shift no argument of a subclass that is given by position.
@dataclass(kw_only=True)
class AdditionalFields:
    """Warmup as a ratio, the TensorBoard folder, keywords for Lightning, how checkpoints are saved, losses averaged."""

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
    async_save: bool = field(
        default=False,
        metadata=about(
            "Write checkpoints in the background; training waits only for a copy of model and optimizer in host memory."
        ),
    )
    jit_checkpoint_signals: list[str] | str | None = field(
        default=None,
        metadata=about(
            "Signals on which `enable_jit_checkpoint` saves and stops, one or several by name, which set it; unset, "
            "SIGTERM."
        ),
    )
    eval_loss_weighting: str = field(
        default=EVAL_LOSS_WEIGHTINGS[0],
        metadata=about(
            "What a batch's mean loss counts for in the evaluation loss: `batches`, as in transformers, for the batch "
            "size, or for its samples where it is the last one of a dataset with a length; `samples` for the samples "
            "in it; `labels` for its labels other than -100, which is exact where each token has one.",
            choices=list(EVAL_LOSS_WEIGHTINGS),
        ),
    )
