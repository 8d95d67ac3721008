"""DeepSpeed's own layer of communication, over the process group that is up."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from littrainer.distributed.group import backend_for, ensure_process_group, is_up

if TYPE_CHECKING:
    from littrainer.arguments.process import ProcessFacts

# What DeepSpeed's engine reads of a process that no launcher has started.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def start(args: ProcessFacts) -> None:
    """Bring the process group up, and let DeepSpeed communicate over it.

    Raises:
        RuntimeError: DeepSpeed works on another kind of device than the training.
    """
    deepspeed: Any = importlib.import_module("deepspeed")
    works_on = importlib.import_module("deepspeed.accelerator").get_accelerator().device_name()
    if works_on != args.device.type:
        raise RuntimeError(
            f"DeepSpeed works on {works_on}, and this training on {args.device.type}: "
            + (
                "set use_cpu=True, or start the script with the environment variable DS_ACCELERATOR="
                f"{args.device.type}."
                if works_on == "cpu"
                else "leave use_cpu unset, or start the script with the environment variable DS_ACCELERATOR=cpu."
            )
        )
    ensure_process_group(args)
    if not is_up():
        # The engine communicates even where it is alone.
        for name, value in ALONE.items():
            os.environ.setdefault(name, value)
        backend = backend_for(args.device.type, args.ddp_backend)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(
        dist_backend=dist.get_backend(), timeout=args.ddp_timeout_delta, auto_mpi_discovery=False
    )
