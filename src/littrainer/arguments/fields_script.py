"""Arguments about debugging, and those that scripts read for themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

from littrainer.arguments.about import about
from littrainer.arguments.choices import DebugOption


@dataclass
class ScriptFields:
    """Debug switches, what a script is to do, and the checkpoint it starts from."""

    debug: str | list[DebugOption] = field(
        default="",
        metadata=about("Extra checks, by name and separated by blanks: `underflow_overflow`, `tpu_metrics_debug`."),
    )
    skip_memory_metrics: bool = field(
        default=True, metadata=about("Leave memory use out of the metrics; measuring it slows training down.")
    )
    do_train: bool = field(
        default=False, metadata=about("For scripts: whether to train. The Trainer does not read it.")
    )
    do_eval: bool = field(
        default=False,
        metadata=about("For scripts: whether to evaluate; becomes true when `eval_strategy` is not `no`."),
    )
    do_predict: bool = field(
        default=False, metadata=about("For scripts: whether to predict on test data. The Trainer does not read it.")
    )
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata=about(
            "For scripts: checkpoint to hand to `train(resume_from_checkpoint=...)`. The Trainer does not read it."
        ),
    )
    local_rank: int = field(
        default=-1,
        metadata=about(
            "Kept for old launchers that pass it. A launcher's rank on this machine is written here, as in "
            "transformers 4; read `local_process_index` instead."
        ),
    )
