"""Which of Lightning's strategies the arguments ask for.

Asking for its name loads neither Lightning nor any of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from littrainer.arguments.deepspeed import asks_for_deepspeed
from littrainer.arguments.sharding import sharding_plan
from littrainer.processes.layout import tensor_parallel_size

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

    from littrainer.trainer import Trainer


def _computes_layers_together(args: Any) -> bool:
    return tensor_parallel_size(args) > 1


def _shards_by_version(version: int) -> Callable[[Any], bool]:
    def is_asked_for(args: Any) -> bool:
        plan = sharding_plan(args)
        return plan is not None and plan.version == version

    return is_asked_for


def _alone(args: Any) -> bool:
    return args.world_size == 1


def _always(args: Any) -> bool:
    return True


# Name -> whether arguments ask for it, its module here, and the function in it that makes it for a Trainer. The first
# that is asked for is taken.
STRATEGIES: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "DeepSpeed": (asks_for_deepspeed, "deepspeed", "deepspeed_strategy"),
    "FSDP version 1": (_shards_by_version(1), "sharded_v1", "first_version_strategy"),
    "FSDP": (_shards_by_version(2), "sharded", "sharded_strategy"),
    "tensor parallel": (_computes_layers_together, "tensor_parallel", "tensor_parallel_strategy"),
    "single device": (_alone, "single_device", "single_device_strategy"),
    "DDP": (_always, "data_parallel", "data_parallel_strategy"),
}


def strategy_name(args: Any) -> str:
    """The name, among `STRATEGIES`, of the strategy that arguments ask for."""
    return next(name for name, (is_asked_for, *_) in STRATEGIES.items() if is_asked_for(args))


def strategy_for(trainer: Trainer) -> Strategy:
    """A new strategy for a `lightning.Trainer` that carries out what a Trainer asks for."""
    _, module, function = STRATEGIES[strategy_name(trainer.args)]
    make: Callable[[Trainer], Strategy] = getattr(importlib.import_module(f"{__package__}.{module}"), function)
    return make(trainer)
