"""Which of Lightning's strategies the arguments ask for.

Asking for its name loads neither Lightning nor any of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from littrainer.arguments.deepspeed import has_deepspeed
from littrainer.arguments.sharding import get_sharding_plan
from littrainer.distributed.layout import tensor_parallel_size

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy


class TrainedModel(Protocol):
    """What a strategy works on, looked at when it is needed: a training may exchange all of it."""

    args: Any
    model: Any
    model_wrapped: Any
    optimizer: Any


def _fsdp_version(args: Any) -> int | None:
    plan = get_sharding_plan(args)
    return None if plan is None else plan.version


# Name -> whether arguments ask for it, its module here, and the function in it that makes it. The first that is asked
# for is taken.
STRATEGIES: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "DeepSpeed": (has_deepspeed, "deepspeed", "TrainerDeepSpeedStrategy"),
    "FSDP version 1": (lambda args: _fsdp_version(args) == 1, "fsdp1", "ResidentFSDP1Strategy"),
    "FSDP": (lambda args: _fsdp_version(args) == 2, "model_parallel", "ResidentModelParallelStrategy"),
    "tensor parallel": (lambda args: tensor_parallel_size(args) > 1, "model_parallel", "ResidentModelParallelStrategy"),
    "single device": (lambda args: args.world_size == 1, "single_device", "create_single_device_strategy"),
    "DDP": (lambda args: True, "data_parallel", "create_ddp_strategy"),
}

# Strategies that split the model's parameters in place when Lightning sets them up.
SHARDING_STRATEGIES = ("FSDP version 1", "FSDP", "tensor parallel")


def strategy_name(args: Any) -> str:
    """The name, among `STRATEGIES`, of the strategy that arguments ask for."""
    return next(name for name, (is_asked_for, *_) in STRATEGIES.items() if is_asked_for(args))


def create_strategy(trained: TrainedModel) -> Strategy:
    """A new strategy for a `lightning.Trainer` that carries out what the arguments ask for."""
    _, module, function = STRATEGIES[strategy_name(trained.args)]
    make: Callable[[TrainedModel], Strategy] = getattr(importlib.import_module(f"{__package__}.{module}"), function)
    return make(trained)
