"""Arguments about training with several processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from littrainer.arguments.about import about

PROCESS_GROUP_BACKENDS = ("nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl")


@dataclass
class DistributedFields:
    """Distributed data parallel, fully sharded data parallel and DeepSpeed."""

    ddp_find_unused_parameters: bool | None = field(
        default=None,
        metadata=about(
            "DDP searches for parameters that got no gradient; unset does unless activations are checkpointed."
        ),
    )
    ddp_bucket_cap_mb: int | None = field(
        default=None, metadata=about("Size of DDP's gradient buckets in MiB; unset takes torch's.")
    )
    ddp_broadcast_buffers: bool | None = field(
        default=None,
        metadata=about("DDP copies the main process's buffers at each forward, as it does where this is unset."),
    )
    ddp_static_graph: bool | None = field(
        default=None, metadata=about("Tell DDP that each step uses the same parameters in the same order.")
    )
    ddp_backend: str | None = field(
        default=None,
        metadata=about(
            "Communication library of the processes; unset fits the device.", choices=list(PROCESS_GROUP_BACKENDS)
        ),
    )
    ddp_timeout: int = field(default=1800, metadata=about("Seconds after which a collective operation gives up."))
    fsdp: str | None = field(
        default=None,
        metadata=about("Shard parameters, gradients and optimizer state over the processes.", nargs="?", const=True),
    )
    fsdp_config: dict[str, Any] | str | None = field(
        default=None, metadata=about("Settings of `fsdp` as a dict or the path of a JSON file.")
    )
    deepspeed: dict[str, Any] | str | None = field(
        default=None,
        metadata=about(
            "DeepSpeed configuration as a dict or the path of a JSON file; giving one switches DeepSpeed on."
        ),
    )
