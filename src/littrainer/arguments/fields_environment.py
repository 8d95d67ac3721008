"""Arguments about random seeds and the device a process runs on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from littrainer.arguments.about import about
from littrainer.arguments.accelerator_config import AcceleratorConfig


@dataclass
class EnvironmentFields:
    """Determinism, seeds, device and the settings users know from accelerate."""

    full_determinism: bool = field(
        default=False,
        metadata=about(
            "Use deterministic kernels throughout, so that two runs are equal; slower, meant for debugging."
        ),
    )
    seed: int = field(default=42, metadata=about("Random seed set before training."))
    data_seed: int | None = field(
        default=None, metadata=about("Random seed of the training sampler; unset takes `seed`.")
    )
    use_cpu: bool = field(default=False, metadata=about("Run on the CPU even where there is a GPU."))
    accelerator_config: dict[str, Any] | str | AcceleratorConfig | None = field(
        default=None,
        metadata=about(
            "Settings of batches as a dict or the path of a JSON file; `split_batches`, `even_batches` and "
            "`sync_each_batch` are about several processes and change nothing in one."
        ),
    )
    parallelism_config: Any | None = field(
        default=None,
        metadata=about(
            "Layout of the processes: a dict with some of `dp_replicate_size`, `dp_shard_size` and `tp_size`, or "
            "accelerate's ParallelismConfig."
        ),
    )
