"""Choice of the strategy, without importing Lightning."""

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
    """The parts of a Trainer that strategies read late, since a training may replace them."""

    args: Any
    model: Any
    model_wrapped: Any
    optimizer: Any
    is_fsdp_enabled: bool


def _fsdp_version(args: Any) -> int | None:
    plan = get_sharding_plan(args)
    return None if plan is None else plan.version


# Name -> condition, module and factory; the first match counts.
STRATEGIES: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "DeepSpeed": (has_deepspeed, "deepspeed", "TrainerDeepSpeedStrategy"),
    "FSDP version 1": (lambda args: _fsdp_version(args) == 1, "fsdp1", "ResidentFSDP1Strategy"),
    "FSDP": (lambda args: _fsdp_version(args) == 2, "model_parallel", "ResidentModelParallelStrategy"),
    "tensor parallel": (lambda args: tensor_parallel_size(args) > 1, "model_parallel", "ResidentModelParallelStrategy"),
    "single device": (lambda args: args.world_size == 1, "single_device", "create_single_device_strategy"),
    "DDP": (lambda args: True, "data_parallel", "create_ddp_strategy"),
}

SHARDING_STRATEGIES = ("FSDP version 1", "FSDP", "tensor parallel")


def strategy_name(args: Any) -> str:
    return next(name for name, (is_requested, *_) in STRATEGIES.items() if is_requested(args))


def create_strategy(trained: TrainedModel) -> Strategy:
    _, module, function = STRATEGIES[strategy_name(trained.args)]
    create: Callable[[TrainedModel], Strategy] = getattr(importlib.import_module(f"{__package__}.{module}"), function)
    return create(trained)
