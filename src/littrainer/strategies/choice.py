"""Which of Lightning's strategies the arguments ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import Strategy

from littrainer.arguments.deepspeed_plugin import asks_for_deepspeed
from littrainer.arguments.sharding import sharding_plan
from littrainer.processes.layout import tensor_parallel_size
from littrainer.strategies.data_parallel import data_parallel_strategy
from littrainer.strategies.deepspeed import deepspeed_strategy
from littrainer.strategies.sharded import sharded_strategy
from littrainer.strategies.sharded_v1 import first_version_strategy
from littrainer.strategies.single_device import ResidentSingleDeviceStrategy
from littrainer.strategies.tensor_parallel import tensor_parallel_strategy

if TYPE_CHECKING:
    from littrainer.trainer import Trainer


def _single_device(trainer: Trainer) -> Strategy:
    return ResidentSingleDeviceStrategy(device=trainer.args.device)


def _data_parallel(trainer: Trainer) -> Strategy:
    return data_parallel_strategy(trainer)


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


# Name -> whether arguments ask for it, and what makes it. The first that is asked for is taken.
STRATEGIES: dict[str, tuple[Callable[[Any], bool], Callable[[Trainer], Strategy]]] = {
    "DeepSpeed": (asks_for_deepspeed, deepspeed_strategy),
    "FSDP version 1": (_shards_by_version(1), first_version_strategy),
    "FSDP": (_shards_by_version(2), sharded_strategy),
    "tensor parallel": (_computes_layers_together, tensor_parallel_strategy),
    "single device": (_alone, _single_device),
    "DDP": (_always, _data_parallel),
}


def strategy_name(args: Any) -> str:
    """The name, among `STRATEGIES`, of the strategy that arguments ask for."""
    return next(name for name, (is_asked_for, _) in STRATEGIES.items() if is_asked_for(args))


def strategy_for(trainer: Trainer) -> Strategy:
    """A new strategy for a `lightning.Trainer` that carries out what a Trainer asks for."""
    _, make = STRATEGIES[strategy_name(trainer.args)]
    return make(trainer)
