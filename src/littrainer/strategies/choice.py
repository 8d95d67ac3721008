"""Choice of the strategy, without importing Lightning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol

from littrainer.arguments.deepspeed import has_deepspeed
from littrainer.arguments.sharding import get_sharding_plan
from littrainer.distributed.layout import tensor_parallel_size

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy


class TrainedModel(Protocol):
    """The parts of a Trainer that strategies read late, since a training may replace them."""

    args: Any
    model: Any
    model_wrapped: Any
    optimizer: Any
    is_fsdp_enabled: bool


# Name -> module and factory.
STRATEGIES: dict[str, tuple[str, str]] = {
    "DeepSpeed": ("deepspeed", "TrainerDeepSpeedStrategy"),
    "FSDP version 1": ("fsdp1", "ResidentFSDP1Strategy"),
    "FSDP": ("model_parallel", "ResidentModelParallelStrategy"),
    "tensor parallel": ("model_parallel", "ResidentModelParallelStrategy"),
    "single device": ("single_device", "create_single_device_strategy"),
    "DDP": ("data_parallel", "create_ddp_strategy"),
}

SHARDING_STRATEGIES = ("FSDP version 1", "FSDP", "tensor parallel")


def strategy_name(args: Any) -> str:
    if has_deepspeed(args):
        return "DeepSpeed"
    if (plan := get_sharding_plan(args)) is not None:
        return "FSDP" if plan.version == 2 else "FSDP version 1"
    if args.world_size == 1:
        return "single device"
    return "tensor parallel" if tensor_parallel_size(args) > 1 else "DDP"


def create_strategy(trained: TrainedModel) -> Strategy:
    module, function = STRATEGIES[strategy_name(trained.args)]
    strategy: Strategy = getattr(importlib.import_module(f"{__package__}.{module}"), function)(trained)
    return strategy
